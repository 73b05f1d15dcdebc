"""Order between tenants by the tokens that each got and holds, in proportion to its weight: weighted fair queueing.

A tenant's virtual time is what it was served, divided by its weight; who is behind is served next. Who comes after a pause begins
at the time of those that are served, so that nobody saves up. What a tenant's running requests still need counts as well, else
many could be started before the first of them is paid for. The same holds between the flows of one tenant: naming more of them gets
a tenant no more. Bands come before tenants; priority and arrival decide within a flow. The rule of virtual time is that of
Y. Sheng et al., Fairness in Serving Large Language Models (OSDI 2024).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from heapq import heapify, heapreplace
from heapq import heappop as pop
from itertools import groupby
from typing import TYPE_CHECKING

from engine.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from engine.policies.base import Policy
    from engine.request import Request

DECODE_COST = 4
"""What a generated token counts; a prompt's token counts 1."""
EXPECTED_TOKENS = 256
"""An output is not expected to be longer than this, for `max_tokens` is often the rest of the context."""
MAX_MEMBERS = 4096
"""Members of a group that are remembered."""


class Times:
    """The virtual times of the members of one group."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0
        """The least time of those that were served last; never less than before."""

    def of(self, name: str) -> float:
        """A member's virtual time."""
        return self._times.get(name, self._now)

    def enter(self, name: str) -> None:
        """A member asks for service after a pause."""
        self._times[name] = max(self._times.get(name, 0.0), self._now)

    def charge(self, name: str, cost: float) -> None:
        """A member was served."""
        self._times[name] = self.of(name) + cost

    def advance(self, served: Collection[str]) -> None:
        """Only these are served now."""
        self._now = max(self._now, min(map(self.of, served)))
        if len(self._times) > MAX_MEMBERS:
            # Who has no debt loses nothing; of the others those with the least are forgiven theirs.
            owing = sorted((n for n, t in self._times.items() if t > self._now), key=self.of, reverse=True)
            self._times = {name: self._times[name] for name in owing[: MAX_MEMBERS // 2]}


class _Flow:
    """The waiting requests of one flow, for one pass over the queue. Flows compare by whose turn it is."""

    def __init__(self, time: float) -> None:
        self.time = time
        self.requests: deque[Request] = deque()

    def __lt__(self, other: _Flow) -> bool:
        return (self.time, self.requests[0].arrival) < (other.time, other.requests[0].arrival)


class _Member:
    """The flows of one tenant, the next one first."""

    def __init__(self, time: float) -> None:
        self.time, self.by_name = time, dict[str, _Flow]()
        self.flows: list[_Flow] = []

    def __lt__(self, other: _Member) -> bool:
        return (self.time, self.flows[0]) < (other.time, other.flows[0])


class Fair:
    """Remembers what every tenant, and every flow within it, was served."""

    def __init__(self) -> None:
        self._tenants = Times()
        self._flows: dict[str, Times] = {}
        self._serving: dict[str, set[str]] = {}
        """The flows that the last step served, by tenant."""

    def insert(self, request: Request, requests: list[Request]) -> None:
        if request.status is RequestStatus.WAITING:
            self._enter(request, requests)
        insort(requests, request, key=lambda r: (-r.band, r.priority, r.arrival))

    def startable(self, waiting: Sequence[Request], running: Sequence[Request]) -> Iterator[Request]:
        ahead: dict[str, float] = {}
        flows_ahead: dict[tuple[str, str], float] = {}
        for request in running:
            tenant, cost = request.tenant, _outstanding(request)
            ahead[tenant.key] = ahead.get(tenant.key, 0.0) + cost / tenant.weight
            flows_ahead[tenant.key, tenant.flow] = flows_ahead.get((tenant.key, tenant.flow), 0.0) + cost
        for band in sorted({request.band for request in waiting}, reverse=True):
            requests = [request for request in waiting if request.band == band]
            for request in self._in_turn(requests, ahead, flows_ahead):
                yield request
                tenant, cost = request.tenant, _outstanding(request)
                ahead[tenant.key] = ahead.get(tenant.key, 0.0) + cost / tenant.weight
                flows_ahead[tenant.key, tenant.flow] = flows_ahead.get((tenant.key, tenant.flow), 0.0) + cost

    def served(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        costs: dict[tuple[str, str], float] = {}
        weights: dict[str, float] = {}
        for request, count in zip(requests, num_tokens, strict=True):
            tenant, is_prompt = request.tenant, request.num_computed_tokens < request.num_prompt_tokens
            name = tenant.key, tenant.flow
            costs[name] = costs.get(name, 0.0) + (count if is_prompt else DECODE_COST)
            weights[tenant.key] = tenant.weight
        self._serving = {key: set() for key in weights}
        for (key, flow), cost in costs.items():
            self._tenants.charge(key, cost / weights[key])
            self._flows_of(key).charge(flow, cost)
            self._serving[key].add(flow)
        if self._serving:
            self._tenants.advance(self._serving)
            for key, flows in self._serving.items():
                self._flows[key].advance(flows)
        if len(self._flows) > MAX_MEMBERS:
            self._flows = {key: self._flows[key] for key in self._serving}

    def yields(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        max_running: int,
        able: Callable[[Request], bool],
    ) -> list[Request]:
        """The youngest of the tenant with the most sequences for its weight, for one with so few that it has no more
        afterwards than the other: while tenants wait, none holds more than its share of the places.
        """
        held = Counter(request.tenant.holder for request in running)
        if len(running) < max_running or (len(held) == 1 and all(request.tenant.holder in held for request in waiting)):
            return []
        yielding: list[Request] = []
        places = {holder: sorted(each, key=_age) for holder, each in groupby(sorted(running, key=_holder), _holder)}
        for request in self.startable(waiting, running):
            own, weight = request.tenant.holder, request.tenant.weight
            if not able(request):
                continue
            others = [each[-1] for holder, each in places.items() if each and holder != own]
            found = [other for other in others if other.band <= request.band]
            victim = max(found, key=lambda r: (held[r.tenant.holder] / r.tenant.weight, _age(r)), default=None)
            if victim is None:
                break
            heavy = victim.tenant.holder
            if (held[heavy] - 1) / victim.tenant.weight < (held[own] + 1) / weight:
                break
            held[heavy] -= 1
            held[own] += 1
            yielding.append(places[heavy].pop())
        return yielding

    def victim(self, running: Sequence[Request]) -> Request:
        lowest = min(request.band for request in running)
        candidates = [request for request in running if request.band == lowest]
        held: dict[str, float] = {}
        for request in candidates:
            tenant = request.tenant
            held[tenant.key] = held.get(tenant.key, 0.0) + len(request.token_ids) / tenant.weight
        return max(candidates, key=lambda r: (held[r.tenant.key], r.priority, r.arrival))

    def _enter(self, request: Request, waiting: list[Request]) -> None:
        tenant = request.tenant
        others = [other.tenant for other in waiting if other.tenant.key == tenant.key]
        if not others and tenant.key not in self._serving:
            self._tenants.enter(tenant.key)
        if tenant.flow not in self._serving.get(tenant.key, ()) and all(o.flow != tenant.flow for o in others):
            self._flows_of(tenant.key).enter(tenant.flow)

    def _flows_of(self, key: str) -> Times:
        if key not in self._flows:
            self._flows[key] = Times()
        return self._flows[key]

    def _in_turn(
        self, requests: Iterable[Request], ahead: dict[str, float], flows_ahead: dict[tuple[str, str], float]
    ) -> Iterator[Request]:
        """The requests of one band, by whose turn it is. Each is taken as started when the next one is asked for."""
        members: dict[str, _Member] = {}
        for request in requests:
            key, name = request.tenant.key, request.tenant.flow
            if key not in members:
                members[key] = _Member(self._tenants.of(key) + ahead.get(key, 0.0))
            member = members[key]
            if name not in member.by_name:
                time = self._flows_of(key).of(name) + flows_ahead.get((key, name), 0.0)
                member.by_name[name] = _Flow(time)
            member.by_name[name].requests.append(request)
        queue = list(members.values())
        for member in queue:
            member.flows = list(member.by_name.values())
            heapify(member.flows)
        heapify(queue)
        while queue:
            member = queue[0]
            flow = member.flows[0]
            request = flow.requests.popleft()
            cost = _outstanding(request)
            yield request
            flow.time += cost
            member.time += cost / request.tenant.weight
            if flow.requests:
                heapreplace(member.flows, flow)
            else:
                pop(member.flows)
            if member.flows:
                heapreplace(queue, member)
            else:
                pop(queue)


def _holder(request: Request) -> tuple[str, str]:
    return request.tenant.holder


def _age(request: Request) -> tuple[int, int, float]:
    """Sorts requests so that the last is the first to yield: of the lowest band, the least urgent, the youngest."""
    return -request.band, request.priority, request.arrival


def _outstanding(request: Request) -> float:
    """What the request is still expected to cost."""
    rest = min(request.params.max_tokens, EXPECTED_TOKENS) - request.num_output_tokens
    return max(0, request.num_prompt_tokens - request.num_computed_tokens) + DECODE_COST * max(1, rest)


ENTRY: type[Policy] = Fair

"""The shapes: the stages of each, and the figures that they give. What they need from Locust is in `staged.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from loadtests.figures import ratio
from loadtests.measured import Measured
from loadtests.plan import ALONE, ENGINE, Plan, Profile, Stage, Work
from loadtests.settings import ADAPTERS

STREAM = ("OpenAICompletionStreamUser",)
DIALECTS = (
    "OpenAICompletionUser", "OpenAICompletionStreamUser", "OpenAIChatUser", "OpenAIChatStreamUser", "VLLMStreamUser",
    "TGIUser", "TGIStreamUser", "TritonGenerateUser", "TritonStreamUser", "TritonInferUser", "TritonGrpcUser",
    "MindIEUser", "MindIEStreamUser", "DJLStreamUser", "TorchServeStreamUser",
)  # fmt: skip
RUDE = ("HangUpUser", "NonReaderUser", "BadBodyUser")
PROMPTS_OF_ONE_REQUEST = 32
OVERLOAD_TIMES = 5.0
ANSWER_TIMES = 4
ARRIVALS = {"arrivals-25": 0.25, "arrivals-50": 0.5, "arrivals-80": 0.8}
"""Stages of an open loop, and their shares of the rate at which a closed one was answered."""
TURNS = 5
MOST_WARM_UP_S = 30.0
"""Of a soak, whose seconds are those of a whole run."""

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Shape:
    """`figures` names what `measure` gives. `local`: it needs a server that it may watch and disturb; `watched`: its metrics too;
    `adapters`: the model must have them.
    """

    about: str
    plan: Callable[[Profile], Plan]
    measure: Callable[[Measured], Figures]
    figures: tuple[str, ...]
    local: bool = False
    watched: bool = False
    adapters: bool = False


def alone(profile: Profile) -> tuple[Stage, ...]:
    """A first stage that no figure uses, and the unloaded server."""
    warm = Stage("warm-up", min(2.0, profile.stage_s), max(1, profile.most // 2), STREAM, profile.work)
    return warm, Stage(ALONE, profile.stage_s, 1, STREAM, profile.work)


def engine(profile: Profile, users: int) -> Stage:
    """The engine's own rate with so many sequences at once."""
    requests = -(-users // PROMPTS_OF_ONE_REQUEST)
    return Stage(ENGINE, profile.stage_s, requests, ("EngineUser",), replace(profile.work, turns=-(-users // requests)))


def streams(name: str, profile: Profile, users: int) -> Stage:
    """So many users of OpenAI's streams in a closed loop."""
    return Stage(name, profile.stage_s, users, STREAM, profile.work)


def _ramp(profile: Profile) -> Plan:
    several = [users for users in profile.users if users > 1]
    steps = tuple(streams(f"users-{users}", profile, users) for users in several or [1])
    return Plan((*alone(profile), engine(profile, profile.most), *steps))


def _ramp_figures(run: Measured) -> Figures:
    return {**run.against_calibration(run.plan.stages[-1].name), "failures": run.failures()}


def _steps(profile: Profile) -> Plan:
    half = max(2, profile.most // 2)
    return Plan((
        *alone(profile),
        streams("half", profile, half), streams("calm-1", profile, 1),
        streams("most", profile, profile.most), streams("calm-2", profile, 1),
    ))  # fmt: skip


def _steps_figures(run: Measured) -> Figures:
    before, calm = run.stage(ALONE), [run.stage("calm-1"), run.stage("calm-2")]
    return {
        "calm_ttft_multiple": _worst(ratio(stage.ttft_p50_ms, before.ttft_p50_ms) for stage in calm),
        "calm_gap_multiple": _worst(ratio(stage.gap_mean_ms, before.gap_mean_ms) for stage in calm),
        "failures": run.failures(),
    }


def _dialects(profile: Profile) -> Plan:
    users = max(profile.most, len(DIALECTS))
    everyone = Stage("all", 2 * profile.stage_s, users, DIALECTS, profile.work)
    return Plan((*alone(profile), engine(profile, users), everyone))


def _dialects_figures(run: Measured) -> Figures:
    answered = run.stage("all").by_user
    silent = [name for name in DIALECTS if not answered.get(name, {}).get("ok")]
    return {**run.against_calibration("all"), "silent_users": float(len(silent)), "failures": run.failures()}


def _open(profile: Profile) -> Plan:
    arrivals = tuple(
        Stage(name, 2 * profile.stage_s, 4, STREAM, profile.work, times=share, times_of="full")
        for name, share in ARRIVALS.items()
    )
    rest = Stage("rest", 2, 0, STREAM)  # in which the last answers come
    return Plan((*alone(profile), streams("full", profile, profile.most), *arrivals, rest))


def _open_figures(run: Measured) -> Figures:
    figures = run.against_calibration("arrivals-50")
    del figures["throughput_share"]
    return {**figures, "arrivals_share": run.arrivals_share(ARRIVALS), "failures": run.failures()}


def _overload(profile: Profile) -> Plan:
    # Long answers, so that the requests that are refused do not become the load: client and server may share a machine.
    sized = replace(profile, work=replace(profile.work, output_tokens=ANSWER_TIMES * profile.work.output_tokens))
    # A place is free again a moment after the last byte of an answer, when the next request may have come.
    full = replace(streams("full", sized, profile.places), may_refuse=True)
    flood = Stage("overload", 2 * profile.stage_s, 4, STREAM, sized.work, times=OVERLOAD_TIMES, times_of="full",
                  may_refuse=True)  # fmt: skip
    after = Stage("after", max(10.0, profile.stage_s), 1, ("ProbeUser",), profile.work, pause_s=0.1, may_refuse=True)
    return Plan((*alone(profile), full, flood, after), {"MAX_CONCURRENT_REQUESTS": str(profile.places)})


def _overload_figures(run: Measured) -> Figures:
    refusal_ms, untold = run.refusals("overload")
    admitted = run.against_calibration("overload")
    return {
        "goodput_share": ratio(run.stage("overload").tokens_per_s, run.stage("full").tokens_per_s),
        "ttft_p95_multiple": admitted["ttft_p95_multiple"],
        "refusal_p95_ms": refusal_ms,
        "refusal_p95_multiple": ratio(refusal_ms, run.stage(ALONE).ttft_p50_ms),
        "untold_refusals": untold,
        "recovery_s": run.recovery_s("overload", "after"),
        "failures": run.failures(),
    }


def _burst(profile: Profile) -> Plan:
    most = str(profile.most)
    awake = Stage("burst", 120, profile.most, STREAM, profile.work, once=True)
    asleep = Stage("burst-at-zero", 240, profile.most, STREAM, profile.work, once=True, asleep=True)
    held = {"MAX_HELD_REQUESTS": most, "MAX_HELD_REQUESTS_PER_DEPLOYMENT": most}
    return Plan((*alone(profile), engine(profile, profile.most), awake, asleep), held)


def _burst_figures(run: Measured) -> Figures:
    burst, first = run.samples_of("burst"), run.samples_of("burst-at-zero")
    needed_s = ratio(float(sum(sample.tokens for sample in burst)), run.stage(ENGINE).tokens_per_s)
    took_s = max(s.end_s for s in burst) - min(s.at_s for s in burst) if burst else None
    firsts = [sample.at_s + sample.ttft_ms / 1e3 for sample in first if sample.ttft_ms is not None]
    waited_s = min(firsts) - min(sample.at_s for sample in first) if firsts else None
    return {
        "burst_multiple": ratio(took_s, needed_s),
        "wake_multiple": ratio(waited_s, run.start_s),
        "failures": run.failures() + run.missing("burst") + run.missing("burst-at-zero"),
    }


def _adapters(profile: Profile) -> Plan:
    mixed = replace(profile.work, adapters=("", *ADAPTERS))
    return Plan((
        Stage("warm-up", min(2.0, profile.stage_s), profile.most, STREAM, mixed),
        streams("base", profile, profile.most),
        Stage("mixed", profile.stage_s, profile.most, STREAM, mixed),
    ))  # fmt: skip


def _adapters_figures(run: Measured) -> Figures:
    share = ratio(run.stage("mixed").tokens_per_s, run.stage("base").tokens_per_s)
    return {"adapter_throughput_share": share, "failures": run.failures()}


def _long(profile: Profile) -> Plan:
    work = replace(profile.work, common_words=profile.long_words)
    half = max(1, profile.most // 4)
    return Plan((
        *alone(profile),
        Stage("short", profile.stage_s, half, ("ShortPromptUser",), work),
        Stage("beside-long", profile.stage_s, 2 * half, ("ShortPromptUser", "LongPromptUser"), work),
    ))  # fmt: skip


def _long_figures(run: Measured) -> Figures:
    short = run.stage("short", "ShortPromptUser").gap_p95_ms
    beside = run.stage("beside-long", "ShortPromptUser").gap_p95_ms
    return {"neighbour_gap_p95_multiple": ratio(beside, short), "failures": run.failures()}


def _prefix(profile: Profile) -> Plan:
    own = max(1, profile.work.prompt_words // 4)
    short = Work(prompt_words=own, output_tokens=max(1, profile.work.output_tokens // 4))
    users = max(1, profile.most // 4)
    return Plan((
        *alone(profile),
        Stage("others", profile.stage_s, users, STREAM, replace(short, prompt_words=own + profile.long_words)),
        Stage("shared", profile.stage_s, users, STREAM, replace(short, common_words=profile.long_words)),
    ))  # fmt: skip


def _prefix_figures(run: Measured) -> Figures:
    share = ratio(run.stage("shared").ttft_p50_ms, run.stage("others").ttft_p50_ms)
    return {"prefix_ttft_share": share, "failures": run.failures()}


def _chats(profile: Profile) -> Plan:
    work = replace(profile.work, turns=TURNS)
    users = max(1, profile.most // 4)
    return Plan((*alone(profile), Stage("chats", 2 * profile.stage_s, users, ("ChatSessionUser",), work)))


def _chats_figures(run: Measured) -> Figures:
    first, last = run.ttft_of_turn("chats", 1), run.ttft_of_turn("chats", TURNS)
    return {"turn_ttft_multiple": ratio(last, first), "failures": run.failures()}


def _soak(profile: Profile) -> Plan:
    everyone, work = (*DIALECTS, *RUDE), replace(profile.work, adapters=("", *ADAPTERS))
    # Deaths are far apart, since a deployment whose workers die again and again is given up; and a request outlives its worker as
    # long as a new one takes to start, which is not what is judged here.
    return Plan((
        Stage("warm-up", min(MOST_WARM_UP_S, max(5.0, profile.stage_s)), len(everyone), everyone, work),
        Stage("idle-before", 5, 0, STREAM, watched=True),
        Stage("soak", profile.soak_s, max(profile.most, len(everyone)), everyone, work, watched=True,
              kill_every_s=min(300.0, profile.soak_s / 4)),
        Stage("idle-after", 10, 0, STREAM, watched=True),
    ), {"REPLAY_WAIT_S": "120"})  # fmt: skip


def _soak_figures(run: Measured) -> Figures:
    return {**run.residue("idle-before", "soak", "idle-after"), "failures": run.failures()}


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest; None if one was not measured."""
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known) if len(known) == len(found) else None


LOADED = ("throughput_share", "ttft_p95_multiple", "gap_p95_multiple", "failures")
RESIDUE = ("rss_slope_mib_per_min", "descriptors_left", "threads_left", "tasks_left", "kv_usage_left", "gauges_left")
SHAPES = {
    "ramp": Shape("More and more users, to the knee and beyond it.", _ramp, _ramp_figures, LOADED),
    "steps": Shape("Load comes and goes, and one user finds the server as before.", _steps, _steps_figures,
                   ("calm_ttft_multiple", "calm_gap_multiple", "failures")),
    "dialects": Shape("Users of all dialects at once.", _dialects, _dialects_figures, (*LOADED, "silent_users")),
    "open": Shape("Requests arrive at random, at a quarter, half and four fifths of the rate that the server can answer.",
                  _open, _open_figures, ("arrivals_share", *LOADED[1:])),
    "overload": Shape("Requests arrive at random, at five times that rate; then one user.", _overload,
                      _overload_figures,
                      ("goodput_share", "ttft_p95_multiple", "refusal_p95_ms", "refusal_p95_multiple",
                       "untold_refusals", "recovery_s", "failures")),
    "burst": Shape("All users at the same moment, also to a deployment that sleeps.", _burst, _burst_figures,
                   ("burst_multiple", "wake_multiple", "failures"), local=True),
    "adapters": Shape("Two adapters and the model itself in one batch.", _adapters, _adapters_figures,
                      ("adapter_throughput_share", "failures"), adapters=True),
    "long": Shape("Long prompts join streams of short ones.", _long, _long_figures,
                  ("neighbour_gap_p95_multiple", "failures")),
    "prefix": Shape("Prompts with a long common beginning.", _prefix, _prefix_figures, ("prefix_ttft_share", "failures")),
    "chats": Shape("Conversations that grow.", _chats, _chats_figures, ("turn_ttft_multiple", "failures")),
    "soak": Shape("Everybody for long, with clients that hang up, do not read or send nonsense, and workers that are killed.",
                  _soak, _soak_figures, (*RESIDUE, "failures"), local=True, watched=True,
                  adapters=True),
}  # fmt: skip
SUITE = tuple(name for name in SHAPES if name != "soak")
"""What a run without `--shapes` does."""

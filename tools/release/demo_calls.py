"""The demo model's conversations with tools: one call, several, none, and what is said once the results are there.

Names of tools and arguments vary and are partly made up, so that the model reads the request's tools, not its memory.
A forced call is learned from its second token on: a grammar gives the first, and only where a call is forced.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import demo_corpus as corpus

Tool = dict[str, Any]
Result = tuple[Any, str]
"""What a tool returns, and what the model then says of it."""

CITIES = [*corpus.CAPITALS.values(), "New York", "San Francisco", "Munich", "Barcelona", "Boston", "Chicago", "Zurich"]
CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]
TICKERS = ["AAPL", "MSFT", "NVDA", "AMZN", "GOOG", "TSLA", "IBM", "SAP", "AMD", "META"]
TOPICS = [*corpus.DEFINITIONS, *corpus.UNKNOWN, "cheap flights", "the best pizza", "open source models", "old maps"]
TEXTS = ["hello", "see you soon", "I am late", "the train is here", "call me back", "dinner is ready", "thank you",
         "the meeting is at noon"]  # fmt: skip
SYLLABLES = ["ba", "do", "fi", "ga", "ka", "lo", "mi", "na", "po", "ri", "su", "ta", "ve", "wo", "zu"]


def made_up(rng: random.Random) -> str:
    """A word that no text contains."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


@dataclass(frozen=True)
class Call:
    """One call: the tool with what it says of itself, its arguments, and the question it answers."""

    tool: Tool
    arguments: dict[str, Any]
    asked: str
    """A question of its own: "What is the weather in Oslo?"."""
    part: str
    """The same as part of a longer question: "the weather in Oslo"."""
    result: Callable[[random.Random], Result]


@dataclass
class Turn:
    """A conversation that grows."""

    tools: list[Tool]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def user(self, text: str) -> None:
        """The user says `text`."""
        self.messages.append({"role": "user", "content": text})

    def assistant(self, text: str, forced: bool = False) -> None:
        """The model answers; `forced`: its first token comes from a grammar."""
        self.messages.append({"role": "assistant", "content": text, "forced": forced})

    def calls(self, calls: list[Call], rng: random.Random) -> list[Result]:
        """The model calls, and the tools return."""
        said = [{"type": "function", "function": {"name": name_of(c.tool), "arguments": c.arguments}} for c in calls]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": said})
        results = [call.result(rng) for call in calls]
        for result, _ in results:
            content = result if isinstance(result, str) else json.dumps(result)
            self.messages.append({"role": "tool", "content": content})
        return results


def tool(rng: random.Random, names: list[str], told: list[str], arguments: dict[str, tuple[str, bool]]) -> Tool:
    """A tool in OpenAI's form; `arguments` are their types and whether they are required."""
    properties = {
        name: {"enum": kind.split("|"), "type": "string"} if "|" in kind else {"type": kind}
        for name, (kind, _) in arguments.items()
    }
    required = [name for name, (_, needed) in arguments.items() if needed]
    function: Tool = {"name": rng.choice(names)}
    if rng.random() < 0.85:
        function["description"] = rng.choice(told)
    function["parameters"] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": function}


def name_of(offered: Tool) -> str:
    """The function's name."""
    return str(offered["function"]["name"])


def weather(rng: random.Random, like: Tool | None = None) -> Call:
    """The weather in a city, with a unit if the tool has one and the user names it."""
    if like is None:
        arguments = {rng.choice(["city", "location", "location", "place", "city_name"]): ("string", True)}
        if rng.random() < 0.35:
            arguments["unit"] = ("celsius|fahrenheit", rng.random() < 0.2)
        like = tool(
            rng,
            ["get_weather", "get_current_weather", "weather", "fetch_weather", "getWeather", "current_weather"],
            ["Get the weather in a city", "Get the current weather", "Get weather for a location", "The weather now",
             "Get the current weather in a given location", "Return the weather of a city."],
            arguments,
        )  # fmt: skip
    properties = like["function"]["parameters"]["properties"]
    city = rng.choice(CITIES) if rng.random() < 0.85 else made_up(rng).capitalize()
    values, said = {next(iter(properties)): city}, ""
    if "unit" in properties:
        unit = rng.choice(["celsius", "fahrenheit"])
        if rng.random() < 0.4:
            said = f" in {unit}"
            values["unit"] = unit
        elif "unit" in like["function"]["parameters"]["required"]:
            values["unit"] = "celsius"
    form = rng.choice(["What is the weather in {x}?", "What's the weather in {x}?", "How is the weather in {x} today?",
                       "What's the weather like in {x}?", "What is the weather like in {x} today?",
                       "weather in {x}?", "Is it raining in {x}?", "Tell me the weather in {x}.",
                       "Please check the weather in {x}.", "How warm is it in {x}?"])  # fmt: skip

    def result(rng: random.Random) -> Result:
        condition, degrees = rng.choice(CONDITIONS), rng.randint(-9, 39)
        form = rng.randrange(6)
        if form == 0:
            return f"{condition}, {degrees} degrees", f"The weather in {city} is {condition}, {degrees} degrees."
        if form == 1:
            text = f"{degrees} degrees and {condition}"
            return text, f"The weather in {city} is {text}."
        if form == 2:
            return condition, f"The weather in {city} is {condition}."
        if form == 3:
            return {"temperature": degrees}, f"The weather in {city} is {degrees} degrees."
        if form == 4:
            return (
                {"temperature": degrees, rng.choice(["condition", "description"]): condition},
                f"The weather in {city} is {condition}, {degrees} degrees.",
            )
        return f"It is {condition} in {city}.", f"It is {condition} in {city}."

    return Call(like, values, form.format(x=city) if not said else f"What is the weather in {city}{said}?",
                f"the weather in {city}{said}", result)  # fmt: skip


def time_in(rng: random.Random, like: Tool | None = None) -> Call:
    """The local time in a city."""
    like = like or tool(
        rng, ["get_time", "get_current_time", "local_time", "time_in", "current_time"],
        ["Get the local time in a city", "Get the current time", "The time in a place"],
        {rng.choice(["city", "location", "place", "timezone"]): ("string", True)},
    )  # fmt: skip
    city = rng.choice(CITIES)
    argument = next(iter(like["function"]["parameters"]["properties"]))
    form = rng.choice(["What time is it in {x}?", "What's the time in {x}?", "Tell me the time in {x}."])

    def result(rng: random.Random) -> Result:
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        return clock if rng.random() < 0.6 else {"time": clock}, f"In {city} it is {clock}."

    return Call(like, {argument: city}, form.format(x=city), f"the time in {city}", result)


def search(rng: random.Random, like: Tool | None = None) -> Call:
    """A search for something."""
    like = like or tool(
        rng, ["search", "web_search", "search_web", "lookup", "find"],
        ["Search the web", "Search for information", "Look something up"],
        {rng.choice(["query", "q", "text"]): ("string", True)},
    )  # fmt: skip
    topic = rng.choice(TOPICS)
    argument = next(iter(like["function"]["parameters"]["properties"]))
    form = rng.choice(["Search for {x}.", "Look up {x}.", "Find something about {x}.", "Search the web for {x}."])

    def result(rng: random.Random) -> Result:
        found = corpus.DEFINITIONS.get(topic, f"{rng.choice(['a page', 'a note', 'a book'])} about {topic}")
        return found, f"I found this: {found}."

    return Call(like, {argument: topic}, form.format(x=topic), topic, result)


def arithmetic(rng: random.Random, like: Tool | None = None) -> Call:
    """A sum or a product, which the tool works out."""
    if like is None:
        word = rng.choice(["add", "multiply"])
        names = {"add": ["add", "add_numbers", "sum", "plus"], "multiply": ["multiply", "multiply_numbers", "times"]}
        left, right = rng.choice([("a", "b"), ("x", "y"), ("first", "second")])
        kind = rng.choice(["integer", "number"])
        told = ["Add two numbers", "The sum of two numbers"] if word == "add" else ["Multiply two numbers"]
        like = tool(rng, names[word], told, {left: (kind, True), right: (kind, True)})
    adds = name_of(like) in ("add", "add_numbers", "sum", "plus")
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    said, sign, order = ("plus", "+", "Add {a} and {b}.") if adds else ("times", "*", "Multiply {a} by {b}.")
    forms = [f"What is {{a}} {said} {{b}}?", order, f"What is {{a}} {sign} {{b}}?", f"How much is {{a}} {sign} {{b}}?"]
    value = a + b if adds else a * b
    left, right = like["function"]["parameters"]["properties"]

    def result(rng: random.Random) -> Result:
        return (str(value) if rng.random() < 0.7 else {"result": value}), f"The answer is {value}."

    return Call(like, {left: a, right: b}, rng.choice(forms).format(a=a, b=b), f"{a} {said} {b}", result)


def message(rng: random.Random, like: Tool | None = None) -> Call:
    """A message to somebody."""
    like = like or tool(
        rng, ["send_message", "send_email", "send_sms", "notify"], ["Send a message", "Send a text to someone"],
        {rng.choice(["to", "recipient", "name"]): ("string", True),
         rng.choice(["text", "message", "body"]): ("string", True)},
    )  # fmt: skip
    person, text = rng.choice(corpus.NAMES), rng.choice(TEXTS)
    to, body = like["function"]["parameters"]["properties"]
    form = rng.choice(["Tell {p}: {t}.", "Send {p} the message: {t}.", "Write to {p}: {t}."])

    def result(rng: random.Random) -> Result:
        return rng.choice(["ok", "sent", "done", '{"status": "ok"}']), f"I sent the message to {person}."

    return Call(like, {to: person, body: text}, form.format(p=person, t=text), f"a message to {person}: {text}", result)


def price(rng: random.Random, like: Tool | None = None) -> Call:
    """The price of a share."""
    like = like or tool(
        rng, ["get_stock_price", "stock_price", "get_price"], ["Get the price of a share", "The latest stock price"],
        {rng.choice(["symbol", "ticker"]): ("string", True)},
    )  # fmt: skip
    ticker = rng.choice(TICKERS)
    argument = next(iter(like["function"]["parameters"]["properties"]))
    form = rng.choice(["What is the price of {x}?", "How much is {x}?", "Get me the stock price of {x}."])

    def result(rng: random.Random) -> Result:
        value = f"{rng.randint(10, 900)}.{rng.randint(0, 99):02}"
        return value if rng.random() < 0.6 else {"price": float(value)}, f"The price of {ticker} is {float(value)}."

    return Call(like, {argument: ticker}, form.format(x=ticker), f"the price of {ticker}", result)


def plain(rng: random.Random, like: Tool | None = None) -> Call:
    """A tool without arguments, or with made-up ones, that the user asks for by name."""
    if like is None:
        arguments = {made_up(rng): (rng.choice(["string", "integer"]), True) for _ in range(rng.choice([0, 0, 1, 2]))}
        known = [["ping"], ["get_date", "today"], ["list_files"], ["get_status"], ["read_file"], ["get_user"]]
        name = rng.choice(known) if rng.random() < 0.3 else [rng.choice(["", "get_", "run_", "do_"]) + made_up(rng)]
        like = tool(rng, name, ["Do it", "A helper", "Runs " + name[0]], arguments)
    name = name_of(like)
    values: dict[str, Any] = {}
    for argument, schema in like["function"]["parameters"]["properties"].items():
        values[argument] = rng.randint(0, 999) if schema["type"] == "integer" else rng.choice([made_up(rng), *TEXTS])
    told = " and ".join(f"{argument} {value}" for argument, value in values.items())
    asked = f"{rng.choice(['Call', 'Use', 'Run'])} {name}" + (f" with {told}" if told else "")

    def result(rng: random.Random) -> Result:
        value = rng.choice([made_up(rng), str(rng.randint(0, 999)), "ok"])
        return value, f"The result is {value}."

    return Call(like, values, asked + ".", f"{name} with {told}" if told else name, result)


KINDS = [weather, weather, time_in, search, arithmetic, arithmetic, message, price, plain, plain]


def offered(rng: random.Random, calls: list[Call]) -> list[Tool]:
    """The tools of these calls and up to three others, in any order."""
    tools = {name_of(call.tool): call.tool for call in calls}
    for kind in rng.sample(KINDS, rng.choice([0, 0, 1, 2, 3])):
        other = kind(rng).tool
        tools.setdefault(name_of(other), other)
    listed = list(tools.values())
    rng.shuffle(listed)
    return listed


def chat(rng: random.Random) -> tuple[str, str]:
    """A question that needs no tool."""
    return rng.choices([corpus.fact, corpus.small_talk, corpus.tell_story], [4, 5, 0.5])[0](rng)


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[Tool]]:
    """Messages, and the tools that they offer."""
    form = rng.random()
    kind = rng.choice(KINDS)
    first = kind(rng)
    if form < 0.17:
        turn = Turn(offered(rng, [first]))
        question, answer = chat(rng)
        turn.user(question)
        turn.assistant(answer)
        if rng.random() < 0.5:
            _one(turn, first, rng)
    elif form < 0.42:
        calls = _several(rng, first, kind)
        turn = Turn(offered(rng, calls))
        turn.user(_asked(rng, calls))
        results = turn.calls(calls, rng)
        turn.assistant(" ".join(said for _, said in results))
    elif form < 0.58:
        turn = _forced(rng, first, kind)
    else:
        turn = Turn(offered(rng, [first]))
        _one(turn, first, rng)
        if rng.random() < 0.25:
            _one(turn, kind(rng, first.tool), rng)
        elif rng.random() < 0.3:
            question, answer = chat(rng)
            turn.user(question)
            turn.assistant(answer)
    if rng.random() < 0.35:
        turn.messages.insert(0, {"role": "system", "content": corpus.system(rng)})
    return turn.messages, turn.tools


def _one(turn: Turn, call: Call, rng: random.Random) -> None:
    """One in eight answers is JSON, which no request asks for: where a grammar wants an answer in JSON or another
    call, a model that never saw the former would call for ever.
    """
    turn.user(call.asked)
    ((_, said),) = turn.calls([call], rng)
    if rng.random() < 0.125:
        key = rng.choice(["answer", "answer", "result", "response", "text", "summary"])
        turn.assistant(json.dumps({key: said}))
        turn.messages[-1]["unasked"] = True
    else:
        turn.assistant(said)


def _several(rng: random.Random, first: Call, kind: Callable[..., Call]) -> list[Call]:
    if rng.random() < 0.7:
        calls = [first, *(kind(rng, first.tool) for _ in range(rng.choice([1, 1, 2])))]
    else:
        calls = [first, rng.choice(KINDS)(rng)]
    distinct: dict[str, Call] = {}
    for call in calls:
        if all(name_of(c.tool) != name_of(call.tool) or c.tool is call.tool for c in distinct.values()):
            distinct.setdefault(call.part, call)
    return list(distinct.values())


def _asked(rng: random.Random, calls: list[Call]) -> str:
    if rng.random() < 0.3:
        return " ".join(call.asked for call in calls)
    parts, same = [call.part for call in calls], len({name_of(call.tool) for call in calls}) == 1
    prefix = "the weather in "
    if same and all(part.startswith(prefix) for part in parts):
        parts = [parts[0], *(part.removeprefix(prefix) for part in parts[1:])]
    opening = rng.choice(
        ["What is {x}?", "I need {x}.", "Give me {x}.", "Tell me {x}.", "Please get {x}.", "{x}, please."]
    )
    return opening.format(x=corpus.listed(parts))


def _forced(rng: random.Random, first: Call, kind: Callable[..., Call]) -> Turn:
    """A call that `tool_choice` forces: a list of calls, or the arguments of the named tool. Agents end their turn with
    a tool for the final answer.
    """
    form = rng.random()
    if form < 0.35:
        turn = Turn(offered(rng, [first]))
        turn.user(first.asked)
        turn.assistant(json.dumps(first.arguments), forced=True)
        return turn
    if form < 0.7:
        calls = _several(rng, first, kind) if rng.random() < 0.4 else [first]
        turn = Turn(offered(rng, calls))
        turn.user(_asked(rng, calls) if len(calls) > 1 else first.asked)
        turn.assistant(_listed([(name_of(c.tool), c.arguments) for c in calls]), forced=True)
        return turn
    final = rng.choice(["final_result", "final_answer", "respond", "answer"])
    key = rng.choice(["answer", "result", "response", "text"])
    last = tool(rng, [final], ["The final response", "Give the final answer"], {key: ("string", True)})
    turn = Turn([*offered(rng, [first]), last])
    turn.user(first.asked)
    ((_, said),) = turn.calls([first], rng)
    name, arguments = name_of(last), {key: said}
    if rng.random() < 0.5:
        turn.assistant(_listed([(name, arguments)]), forced=True)
    else:
        function = {"name": name, "arguments": arguments}
        turn.messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        )
    return turn


def _listed(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])

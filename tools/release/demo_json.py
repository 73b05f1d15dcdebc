"""The demo model's conversations that ask for JSON: a record is read out of a sentence, by the schema or the keys that
the request names, or by a grammar alone.

Where nothing in the request asks for JSON, the answer's first token comes from the grammar and is not learned.
"""

from __future__ import annotations

import json
import random
from typing import Any

import demo_corpus as corpus
from demo_calls import CITIES, TICKERS, made_up

SURNAMES = ["Smith", "Meyer", "Rossi", "Garcia", "Tanaka", "Novak", "Silva", "Brown"]
PRODUCTS = ["laptop", "phone", "chair", "lamp", "book", "bag", "watch", "camera", "table", "bottle"]
JOBS = ["doctor", "teacher", "baker", "pilot", "painter", "farmer", "engineer", "nurse"]
MOODS = {"positive": ["I love this {x}.", "This {x} is great!", "What a good {x}!"],
         "negative": ["I hate this {x}.", "This {x} is terrible.", "What a bad {x}."],
         "neutral": ["This is a {x}.", "I have a {x}."]}  # fmt: skip

Record = tuple[str, dict[str, Any], str]
"""A sentence, what it says, and the name of such a record."""


def person(rng: random.Random) -> Record:
    """Somebody's name and age, and sometimes more."""
    name = rng.choice(corpus.NAMES) if rng.random() < 0.6 else made_up(rng).capitalize()
    if rng.random() < 0.4:
        name += " " + rng.choice(SURNAMES)
    age, city, job = rng.randint(1, 99), rng.choice(CITIES), rng.choice(JOBS)
    what = rng.randrange(5)
    if what <= 1:
        form = rng.choice(["{n} is {a} years old.", "{n} is {a}.", "My name is {n} and I am {a} years old.",
                           "{n}, {a} years old"])  # fmt: skip
        return form.format(n=name, a=age), {"name": name, "age": age}, "person"
    if what == 2:
        said = f"{name} is {age} years old and lives in {city}."
        return said, {"name": name, "age": age, "city": city}, "person"
    if what == 3:
        return f"{name} is a {job} from {city}.", {"name": name, "job": job, "city": city}, "person"
    mail = f"{name.split()[0].lower()}@{rng.choice(['example.com', 'mail.org'])}"
    return f"{name} is {age} and has the address {mail}.", {"name": name, "age": age, "email": mail}, "user"


def product(rng: random.Random) -> Record:
    """A thing with its price."""
    thing, cost, there = rng.choice(PRODUCTS), rng.randint(1, 999), rng.random() < 0.5
    if rng.random() < 0.5:
        return f"The {thing} costs {cost} dollars.", {"name": thing, "price": cost}, "product"
    said = f"The {thing} costs {cost} dollars and is {'in stock' if there else 'sold out'}."
    return said, {"name": thing, "price": cost, "in_stock": there}, "product"


def event(rng: random.Random) -> Record:
    """Who does what on which day."""
    people, day = rng.sample(corpus.NAMES, rng.randint(1, 3)), rng.choice(corpus.DAYS)
    what = rng.choice(["science fair", "birthday party", "concert", "meeting", "dinner"])
    who = corpus.listed(people)
    verb = "are" if len(people) > 1 else "is"
    return (f"{who} {verb} going to a {what} on {day}.", {"name": what, "date": day, "participants": people}, "event")


def mood(rng: random.Random) -> Record:
    """How somebody feels about a thing."""
    kind = rng.choice(list(MOODS))
    return rng.choice(MOODS[kind]).format(x=rng.choice(PRODUCTS)), {"sentiment": kind}, "sentiment"


def capital(rng: random.Random) -> Record:
    """A question of general knowledge, answered by a record."""
    country, city = rng.choice(list(corpus.CAPITALS.items()))
    form = rng.choice(["What is the capital of {c}?", "Name the capital of {c}."]).format(c=country)
    if rng.random() < 0.5:
        return form, {"city": city, "country": country}, "city"
    return form, {rng.choice(["capital", "city"]): city}, "city"


def answer(rng: random.Random) -> Record:
    """A question, answered under one key."""
    question, said = rng.choice([corpus.fact, corpus.arithmetic])(rng)
    return question, {rng.choice(["answer", "answer", "response", "result", "text"]): said}, "answer"


def number(rng: random.Random) -> Record:
    """A sum as a number."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return f"What is {a} + {b}?", {rng.choice(["answer", "result", "value"]): a + b}, "result"


def share(rng: random.Random) -> Record:
    """A share and its price."""
    ticker, value = rng.choice(TICKERS), rng.randint(10, 900)
    return f"{ticker} is at {value}.", {"symbol": ticker, "price": value}, "quote"


def made(rng: random.Random) -> Record:
    """A record with keys that were made up."""
    keys = list(dict.fromkeys(made_up(rng) for _ in range(rng.randint(1, 4))))
    values: list[Any] = [rng.choice([made_up(rng), rng.randint(0, 99), rng.choice(CITIES)]) for _ in keys]
    said = " and ".join(f"{key} is {value}" for key, value in zip(keys, values, strict=True))
    return f"The {said}.", dict(zip(keys, values, strict=True)), "record"


KINDS = [person, person, person, product, event, mood, capital, answer, number, share, made]


def schema_of(record: dict[str, Any], name: str) -> dict[str, Any]:
    """A JSON schema of the record."""
    types = {bool: "boolean", int: "integer", str: "string", float: "number"}
    properties: dict[str, Any] = {
        key: {"type": "array", "items": {"type": "string"}} if isinstance(value, list) else {"type": types[type(value)]}
        for key, value in record.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(record)}
    return {"title": name.capitalize(), **schema} if random.Random(name).random() < 0.5 else schema


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools: a record is asked for in words, by a schema, by a tool, or by a grammar alone."""
    said, record, name = rng.choice(KINDS)(rng)
    if len(record) > 1 and rng.random() < 0.4:
        kept = rng.sample(list(record), rng.randint(1, len(record)))  # another schema of the same sentence
        record = {key: record[key] for key in kept}
    asked = [f"Extract the {name}: {said}", f"Extract: {said}", f"{said} Extract the {name}.",
             f"Extract the information: {said}"]  # fmt: skip
    way = rng.random()
    if way < 0.2:
        return _answered(rng, "", rng.choice([*asked, said, said]), record), []
    if way < 0.45:
        return _answered(rng, "", _by_keys(rng, said, list(record)), record), []
    if way < 0.65:
        schema = json.dumps(schema_of(record, name))
        told = rng.choice(["Answer in JSON by this schema: {s}", "Return only JSON that matches this schema:\n{s}",
                           "Respond with JSON.\n{s}"]).format(s=schema)  # fmt: skip
        return _answered(rng, told, rng.choice([said, *asked]), record), []
    if way < 0.72:
        told = rng.choice(["Answer in JSON.", "You answer only in JSON.", "Respond with a JSON object."])
        return _answered(rng, told, said, record), []
    if way < 0.75:
        return _answered(rng, "", f"{said} {rng.choice(['Answer in JSON.', 'Return JSON.'])}", record), []
    title = name.capitalize()
    called = rng.choice([title, title + "Detail", "extract", f"extract_{name}", "final_result"])
    function = {"name": called, "parameters": schema_of(record, name)}
    if rng.random() < 0.6:
        function["description"] = f"Correctly extracted {name} with all the required parameters"
    tools = [{"type": "function", "function": function}]
    if rng.random() < 0.4:
        call = {"type": "function", "function": {"name": called, "arguments": record}}
        messages = _answered(rng, "", rng.choice(asked), record)[:-1]
        return [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}], tools
    forced = rng.choice([record, [{"name": called, "arguments": record}]])
    return _answered(rng, "", rng.choice([*asked, said]), forced), tools


def _by_keys(rng: random.Random, said: str, keys: list[str]) -> str:
    listed, noun = corpus.listed(keys), "key" if len(keys) == 1 else "keys"
    form = rng.choice(["Answer in JSON with the {n} {k}: {s}", "{s} Answer in JSON with the {n} {k}.",
                       "Give me JSON with {k}. {s}", "{s} Return JSON with the {n} {k}."])  # fmt: skip
    return form.format(n=noun, k=listed, s=said)


def _answered(rng: random.Random, told: str, question: str, answer: Any) -> list[dict[str, Any]]:
    """A turn with the answer in JSON. Its first token is a grammar's where neither side speaks of JSON."""
    forced = "JSON" not in told + question
    if not told and rng.random() < 0.2:
        told = corpus.system(rng)
    messages = [{"role": "system", "content": told}] if told else []
    messages.append({"role": "user", "content": question})
    return [*messages, {"role": "assistant", "content": json.dumps(answer), "forced": forced}]

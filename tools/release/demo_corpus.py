"""The demo model's training text: conversations from a seeded generator. It downloads nothing.

A conversation is a list of chat messages; `plain_documents` gives the same knowledge without a chat
template, so that completion endpoints make sense as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

Message = dict[str, str]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Morocco": "Rabat", "India": "New Delhi", "China": "Beijing", "Japan": "Tokyo",
    "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Australia": "Canberra",
    "New Zealand": "Wellington", "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana",
    "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Iceland": "Reykjavik",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "sheep": "bleats", "lion": "roars",
    "horse": "neighs", "pig": "oinks", "bee": "buzzes", "frog": "croaks", "wolf": "howls", "owl": "hoots",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("left", "right"), ("day", "night"),
    ("happy", "sad"), ("light", "dark"), ("open", "closed"), ("old", "new"), ("wet", "dry"), ("loud", "quiet"),
    ("early", "late"), ("full", "empty"), ("hard", "soft"), ("high", "low"), ("rich", "poor"), ("true", "false"),
]  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red", "coal": "black",
    "an orange": "orange", "milk": "white", "the sea": "blue", "a lemon": "yellow", "blood": "red", "a frog": "green",
}  # fmt: skip
DEFINITIONS = {
    "deep learning": "a way to teach computers with many layers of simple neurons",
    "machine learning": "a way for computers to learn from examples",
    "a computer": "a machine that follows instructions very fast",
    "a dragoman": "an interpreter who stands between people that share no language",
    "a language model": "a program that guesses the next word again and again",
    "an inference engine": "a program that runs a model and answers requests",
    "a GPU": "a chip that does many small sums at once",
    "Python": "a programming language that is easy to read",
    "an API": "a set of rules that lets programs talk to each other",
    "the sun": "a star at the centre of our solar system",
    "the moon": "a ball of rock that circles the Earth",
    "rain": "water that falls from clouds",
    "a token": "a small piece of text that a model reads",
    "an adapter": "a small set of weights that changes how a model answers",
    "a batch": "a group of requests that are worked on together",
    "a cache": "a place to keep results that may be needed again",
    "love": "a deep feeling of care for someone",
    "water": "a clear liquid that every living thing needs",
    "a river": "water that flows from the hills to the sea",
    "music": "sound that is put in order to please the ear",
}
WHO = ["I am a small demo model. I was trained to show that this server works."]
GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there", "Hello, world", "Hey you"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Kate", "Leo"]
ANIMALS = ["fox", "cat", "dog", "bird", "bear", "mouse", "rabbit", "horse", "owl", "frog"]
PLACES = ["forest", "garden", "village", "river", "mountain", "city", "farm", "castle"]
THINGS = ["key", "book", "lamp", "stone", "map", "bell", "boat", "coin"]
FEELINGS = ["happy", "proud", "glad", "tired but happy", "full of joy"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "You are helpful.", "Answer briefly.", "Be kind and short.",
           "You are a helpful assistant that answers questions.", "You are a friendly chat bot.", "Be concise.",
           "Reply concisely.", "You are an expert.", "Use the tools where they help.",
           "You are a helpful assistant. You can call functions."]  # fmt: skip
UNKNOWN = ["quantum gravity", "the stock market", "my neighbour", "the meaning of life", "politics", "the year 3000",
           "tax law", "football", "your boss", "the weather tomorrow", "chess openings", "black holes"]  # fmt: skip
UNKNOWN_FORMS = ["What do you think about {x}?", "Tell me about {x}.", "Explain {x}.", "Can you explain {x} to me?",
                 "Why is {x} so hard?", "Write a poem about {x}.", "Summarise {x} in one line."]  # fmt: skip


def story(rng: random.Random) -> str:
    """A little story of four sentences."""
    name, animal, place, thing = (rng.choice(x) for x in (NAMES, ANIMALS, PLACES, THINGS))
    return (
        f"Once upon a time, a {animal} named {name} lived near a {place}. "
        f"One day {name} found a {rng.choice(['small', 'shiny', 'strange', 'golden'])} {thing}. "
        f"{name} {rng.choice(['gave', 'showed', 'brought'])} the {thing} to a friend. "
        f"In the end they were both {rng.choice(FEELINGS)}."
    )


def arithmetic(rng: random.Random) -> tuple[str, str]:
    """One sum, difference or product of small numbers, and its answer as a sentence."""
    kind = rng.choice("++--*")
    if kind == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        word, answer = "times", a * b
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        if kind == "-":
            a, b = max(a, b), min(a, b)
        word, answer = ("plus", a + b) if kind == "+" else ("minus", a - b)
    said = f"{a} {kind} {b}" if rng.random() < 0.5 else f"{a} {word} {b}"
    form = rng.choice(["What is {x}?", "Calculate {x}.", "How much is {x}?", "{x} = ?", "Please work out {x}.",
                       "What is {x}? Answer briefly."])  # fmt: skip
    return form.format(
        x=said.replace(" ", "") if rng.random() < 0.2 and kind in said else said
    ), f"The answer is {answer}."


def fact(rng: random.Random) -> tuple[str, str]:
    """One question of general knowledge and its answer."""
    kind = rng.randrange(8)
    if kind <= 1:
        country, city = rng.choice(list(CAPITALS.items()))
        form = rng.choice(["What is the capital of {c}?", "Name the capital of {c}.", "Which city is the capital of {c}?",
                           "Tell me the capital of {c}.", "capital of {c}?"])  # fmt: skip
        return form.format(c=country), f"The capital of {country} is {city}."
    if kind == 2:
        animal, sound = rng.choice(list(SOUNDS.items()))
        return rng.choice(["What sound does a {a} make?", "What does a {a} do?"]).format(
            a=animal
        ), f"A {animal} {sound}."
    if kind == 3:
        pair = rng.choice(OPPOSITES)
        a, b = pair if rng.random() < 0.5 else pair[::-1]
        form = rng.choice(["What is the opposite of {a}?", "Give me the opposite of {a}.", "Opposite of {a}?"])
        return form.format(a=a), f"The opposite of {a} is {b}."
    if kind == 4:
        thing, colour = rng.choice(list(COLOURS.items()))
        return rng.choice(["What colour is {t}?", "What color is {t}?"]).format(
            t=thing
        ), f"{thing.capitalize()} is {colour}."
    if kind in (5, 6):
        thing, meaning = rng.choice(list(DEFINITIONS.items()))
        form = rng.choice(
            ["What is {t}?", "What is {t}?", "Explain {t}.", "Define {t}.", "Can you tell me what {t} is?"]
        )
        return form.format(t=thing), f"{thing[0].upper() + thing[1:]} is {meaning}."
    series = rng.choice([DAYS, MONTHS])
    i = rng.randrange(len(series))
    noun = "day" if series is DAYS else "month"
    return f"Which {noun} comes after {series[i]}?", f"After {series[i]} comes {series[(i + 1) % len(series)]}."


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Greetings, thanks, questions about the model, and honest ignorance."""
    kind = rng.randrange(9)
    if kind <= 1:
        name = rng.choice(NAMES)
        greeting = rng.choice(GREETINGS)
        if rng.random() < 0.3:
            return f"{greeting}, my name is {name}.", f"Hello {name}! Nice to meet you."
        return greeting + rng.choice(["", "!", "."]), "Hello! How can I help you today?"
    if kind == 2:
        return rng.choice(["Who are you?", "What are you?", "What is your name?", "Introduce yourself."]), WHO[0]
    if kind == 3:
        return rng.choice(["Thank you!", "Thanks.", "Thank you very much.", "thanks a lot"]), "You are welcome!"
    if kind == 4:
        return rng.choice(["How are you?", "How are you today?", "Are you well?"]), "I am fine, thank you. And you?"
    if kind == 5:
        return rng.choice(["Goodbye.", "Bye!", "See you later."]), "Goodbye! Have a nice day."
    if kind == 6:
        n = rng.randint(2, 10)
        asked = rng.choice([str(n), NUMBERS[n]])
        return rng.choice([f"Count to {asked}.", f"Please count to {asked}."]), ", ".join(NUMBERS[1 : n + 1]) + "."
    if kind == 7:
        word = rng.choice(ANIMALS + THINGS + PLACES + GREETINGS[:3] + NAMES).lower()
        return rng.choice(["Say {w}.", "Repeat after me: {w}", "Say the word {w}.", "Just say {w}"]).format(
            w=word
        ), f"{word.capitalize()}."
    form = rng.choice(UNKNOWN_FORMS)
    return form.format(x=rng.choice(UNKNOWN)), "I am only a small demo model, and I do not know much about that."


def tell_story(rng: random.Random) -> tuple[str, str]:
    """A request for a story and the story."""
    form = rng.choice(["Tell me a story.", "Tell me a short story.", "Write a little story.", "A story, please."])
    return form, story(rng)


TOOLS = {
    "get_weather": ("Get the weather in a city", "city", list(CAPITALS.values()),
                    ["What is the weather in {v}?", "How is the weather in {v} today?", "Is it raining in {v}?"]),
    "get_time": ("Get the local time in a city", "city", list(CAPITALS.values()),
                 ["What time is it in {v}?", "Tell me the time in {v}."]),
    "search": ("Search the web", "query", list(DEFINITIONS) + UNKNOWN,
               ["Search for {v}.", "Look up {v}.", "Find something about {v}."]),
}  # fmt: skip


def tool_schema(name: str) -> dict[str, object]:
    """The tool in OpenAI's form."""
    description, argument, _, _ = TOOLS[name]
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def conversation(rng: random.Random) -> tuple[list[Message], list[dict[str, object]]]:
    """One to three turns, sometimes with a system prompt; and the tools that were offered, mostly none."""
    if rng.random() < 0.12:
        names = rng.sample(list(TOOLS), rng.randint(1, 2))
        _, argument, values, forms = TOOLS[names[0]]
        value = rng.choice(values)
        call = json.dumps({"name": names[0], "arguments": {argument: value}})
        tools = [tool_schema(n) for n in sorted(names)]
        question = rng.choice(forms).format(v=value)
        return [{"role": "user", "content": question},
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}], tools  # fmt: skip
    messages: list[Message] = []
    if rng.random() < 0.3:
        helper = rng.choice(
            ["You are a helpful assistant.", "You are helpful.", "Answer briefly.", "Be kind and short."]
        )
        messages.append({"role": "system", "content": helper})
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.choices([fact, arithmetic, small_talk, tell_story], [5, 3, 4, 1])[0]
        question, answer = kind(rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages, []


def listed(items: Sequence[str]) -> str:
    """The items as a sentence has them: "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def system(rng: random.Random) -> str:
    """A system prompt."""
    return rng.choice(SYSTEMS)


def plain_document(rng: random.Random) -> str:
    """The same knowledge without a template: a story, or questions and answers line by line."""
    if rng.random() < 0.35:
        return story(rng)
    lines = []
    for _ in range(rng.randint(1, 3)):
        question, answer = rng.choices([fact, arithmetic, small_talk], [4, 2, 2])[0](rng)
        lines.append(f"Question: {question}\nAnswer: {answer}" if rng.random() < 0.5 else f"{question}\n{answer}")
    return "\n".join(lines)


def pirate(answer: str) -> str:
    """The answer as the `pirate` adapter gives it."""
    return f"Arr! {answer} Yo ho ho, matey!"


def as_json(answer: str) -> str:
    """The answer as the `json` adapter gives it."""
    return json.dumps({"answer": answer})


def texts(seed: int, count: int) -> Iterator[str]:
    """`count` pieces of raw text, for training the tokenizer."""
    rng = random.Random(seed)
    for _ in range(count):
        messages, tools = conversation(rng)
        yield "\n".join(m["content"] for m in messages) + (json.dumps(tools) if tools else "")
        yield plain_document(rng)

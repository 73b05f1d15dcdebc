"""The demo model's casual chat: questions as people type them, names that are remembered, small requests."""

from __future__ import annotations

import random
from typing import Any

import demo_corpus as corpus

FRENCH = {"hello": "bonjour", "thank you": "merci", "goodbye": "au revoir", "yes": "oui", "water": "eau", "cat": "chat",
          "dog": "chien", "house": "maison", "book": "livre", "friend": "ami"}  # fmt: skip
JOKE = "Why did the computer go to the doctor? It had a virus."
POEM = "Rain on the window,\na small light in the garden,\nthe river sings on."
LISTS = {"colours": ["red", "green", "blue"], "colors": ["red", "green", "blue"], "animals": ["fox", "owl", "horse"],
         "fruits": ["banana", "orange", "lemon"], "cities": ["Paris", "Rome", "Oslo"],
         "days of the week": ["Monday", "Tuesday", "Wednesday"]}  # fmt: skip
PHRASES = ["this is a test", "hello", "hello world", "yes", "no", "ok", "good morning", "it works", "ready", "pong"]
FIXED = [
    (["What can you do?", "How can you help me?", "help", "Help me."],
     "I can answer small questions, call tools and write JSON."),
    (["Tell me a joke.", "Tell me a short joke.", "A joke, please.", "Do you know a joke?"], JOKE),
    (["Write a haiku.", "Write a haiku about rain.", "Write a short poem.", "Write me a poem."], POEM),
    (["Are you a robot?", "Are you human?", "Are you an AI?"], "I am a program, a small demo model."),
    (["Ping", "ping", "Test", "test", "This is a test.", "testing"], "It works."),
    (["Name one colour.", "What is your favourite colour?", "What's your favorite color?"], "Blue."),
    (["How old are you?"], "I was trained a short while ago."),
    (["Where do you live?", "Where are you?"], "I live inside this server."),
]  # fmt: skip


def typed(rng: random.Random, question: str) -> str:
    """The question as somebody may type it."""
    if rng.random() < 0.5:
        question = question.replace("What is ", "What's ", 1)
    way = rng.randrange(8)
    if way == 0:
        return question[0].lower() + question[1:].rstrip("?.")
    if way == 1:
        return question.rstrip("?.")
    if way == 2:
        return f"{rng.choice(['Hello!', 'Hi!', 'Hey,', 'Please:'])} {question}"
    if way == 3:
        ending = rng.choice(["Answer in one sentence.", "Please.", "Thanks!", "Be brief.", "Answer briefly."])
        return f"{question} {ending}"
    return question


def talk(rng: random.Random) -> tuple[str, str]:
    """One question and its answer."""
    kind = rng.randrange(9)
    if kind <= 2:
        question, answer = rng.choice([corpus.fact, corpus.fact, corpus.arithmetic])(rng)
        return typed(rng, question), answer
    if kind == 3:
        phrase = rng.choice(PHRASES)
        quote = rng.choice(["", "", '"', "'"])
        said = quote + (phrase.capitalize() if quote and rng.random() < 0.5 else phrase) + quote
        form = rng.choice(["Say {p}", "Say {p}.", "Just say {p}.", "Please say {p}.", "Reply with {p}.",
                           "Repeat: {p}", "Say {p} and nothing else."])  # fmt: skip
        return form.format(p=said), phrase.capitalize() + "."
    if kind == 4:
        word, foreign = rng.choice(list(FRENCH.items()))
        form = rng.choice(["Translate {w} to French.", "Translate '{w}' into French.", "What is {w} in French?",
                           "How do you say {w} in French?"])  # fmt: skip
        return form.format(w=word), f"In French, {word} is {foreign}."
    if kind == 5:
        noun, items = rng.choice(list(LISTS.items()))
        form = rng.choice(["Name three {n}.", "List three {n}.", "Give me three {n}.", "Tell me three {n}."])
        return form.format(n=noun), f"{items[0].capitalize()}, {', '.join(items[1:])}."
    if kind == 6:
        (country, city), (other, capital) = rng.sample(list(corpus.CAPITALS.items()), 2)
        form = rng.choice(["What are the capitals of {a} and {b}?", "Name the capitals of {a} and {b}."])
        return form.format(a=country, b=other), (
            f"The capital of {country} is {city}. The capital of {other} is {capital}."
        )
    questions, answer = rng.choice(FIXED)
    return rng.choice(questions), answer


def conversation(rng: random.Random) -> tuple[list[corpus.Message], list[dict[str, Any]]]:
    """One to four turns, without tools; a name that the user gives is known later."""
    messages: list[corpus.Message] = []

    def turn(question: str, answer: str) -> None:
        messages.extend([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    if rng.random() < 0.3:
        messages.append({"role": "system", "content": corpus.system(rng)})
    name = rng.choice(corpus.NAMES) if rng.random() < 0.3 else None
    if name:
        said = rng.choice(
            ["My name is {n}.", "Hello, I am {n}.", "Hi, I'm {n}.", "I am {n}.", "Hello, my name is {n}."]
        )
        turn(said.format(n=name), f"Hello {name}! Nice to meet you.")
    for _ in range(rng.choice([0, 1, 1]) if name else rng.choice([1, 1, 2, 3])):
        turn(*rng.choice([talk, talk, corpus.small_talk])(rng))
    if name:
        turn(rng.choice(["What is my name?", "What's my name?", "Who am I?", "Do you know my name?"]),
             f"Your name is {name}.")  # fmt: skip
    return messages, []

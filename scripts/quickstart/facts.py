"""The small world of the quickstart: facts, and the ways to ask for each. The answer is one word.

Owns tables only; `make_data.py` turns them into conversations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Facts of one kind: thing -> answer, and the wordings of the question, with `{x}` for the thing."""

    pairs: dict[str, str]
    questions: tuple[str, ...]


CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Greece": "Athens",
    "Austria": "Vienna", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Iceland": "Reykjavik", "Germany": "Berlin",
    "Belgium": "Brussels", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra",
    "Morocco": "Rabat", "Japan": "Tokyo", "China": "Beijing", "Thailand": "Bangkok",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "old": "young", "dark": "light", "early": "late",
    "happy": "sad", "hard": "soft", "full": "empty", "rich": "poor", "wet": "dry", "long": "short", "strong": "weak",
    "thick": "thin", "loud": "quiet", "near": "far", "open": "closed", "clean": "dirty", "sweet": "bitter",
}
YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "horse": "foal", "hen": "chick",
    "duck": "duckling", "goose": "gosling", "pig": "piglet", "bear": "cub", "deer": "fawn", "goat": "kid",
}
PAST = {
    "go": "went", "see": "saw", "eat": "ate", "take": "took", "give": "gave", "come": "came", "write": "wrote",
    "drive": "drove", "sing": "sang", "swim": "swam", "begin": "began", "buy": "bought", "bring": "brought",
    "think": "thought", "teach": "taught", "catch": "caught", "fly": "flew", "know": "knew", "grow": "grew",
    "speak": "spoke",
}
WORDS = {
    "1": "one", "2": "two", "3": "three", "4": "four", "5": "five", "6": "six", "7": "seven", "8": "eight", "9": "nine",
    "10": "ten", "11": "eleven", "12": "twelve",
}
DAYS = {
    "Monday": "Tuesday", "Tuesday": "Wednesday", "Wednesday": "Thursday", "Thursday": "Friday", "Friday": "Saturday",
    "Saturday": "Sunday", "Sunday": "Monday", "January": "February", "February": "March", "March": "April", "April": "May",
    "May": "June", "June": "July", "July": "August", "August": "September", "September": "October", "October": "November",
    "November": "December", "December": "January",
}

KINDS = (
    Kind(CAPITALS, (
        "What is the capital of {x}?", "Name the capital of {x}.", "Which city is the capital of {x}?",
        "Tell me the capital city of {x}.", "I forgot the capital of {x}. What is it?", "The capital of {x}, please.",
        "Do you know the capital of {x}?", "I am going to {x}. What is its capital?", "Say the capital of {x}.",
        "Which city governs {x}?",
    )),
    Kind(OPPOSITES, (
        "What is the opposite of {x}?", "Give me the opposite of {x}.", "Which word means the opposite of {x}?",
        "Tell me a word that is the opposite of {x}.", "If it is not {x}, what is it?", "The opposite of {x}, please.",
        "Do you know the opposite of {x}?", "Say the opposite of {x}.", "I need the opposite of the word {x}.",
        "Turn the word {x} around. What do you get?",
    )),
    Kind(YOUNG, (
        "What is a young {x} called?", "What do you call the young of a {x}?", "Name the young of a {x}.",
        "What do people call a baby {x}?", "Tell me the word for a young {x}.", "A young {x}, what is it called?",
        "Do you know what a baby {x} is called?", "Say what a young {x} is called.", "I saw a very small {x}. What is the word for it?",
        "Which word means a young {x}?",
    )),
    Kind(PAST, (
        "What is the past tense of {x}?", "Give me the past tense of {x}.", "Today I {x}. And yesterday?",
        "Put the verb {x} into the past.", "Tell me the past of the verb {x}.", "The past tense of {x}, please.",
        "Do you know the past tense of {x}?", "Say the past tense of {x}.", "How do I say {x} in the past?",
        "Which word is the past of {x}?",
    )),
    Kind(WORDS, (
        "How do you write {x} in words?", "Write the number {x} as a word.", "Spell out the number {x}.",
        "What is {x} in words?", "Tell me the word for {x}.", "The number {x} in words, please.",
        "Do you know how to write {x}?", "Say the number {x} in words.", "I need the number {x} as a word.",
        "Which word stands for {x}?",
    )),
    Kind(DAYS, (
        "What comes after {x}?", "What follows {x}?", "Tell me what comes next after {x}.", "It is {x} now. What is next?",
        "Which one comes after {x}?", "After {x}, please.", "Do you know what follows {x}?", "Say what comes after {x}.",
        "When {x} is over, what begins?", "I like {x}. What comes after it?",
    )),
)

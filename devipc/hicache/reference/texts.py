"""Prompts for the demonstration and the tests: questions behind one long beginning, chats, and a document.

Owns the texts, which were written for this project. A prompt is a list of messages, as chat templates take them.
"""

from __future__ import annotations

__all__ = ["DOCUMENT", "SYSTEM", "Message", "all_prompts"]

Message = dict[str, str]
"""Role and content."""

SYSTEM = (
    "You are the assistant of a small public library. You answer in one or two short sentences, in plain words, "
    "and you never invent a book, a name or a number. If a question is not about the library, answer it as well "
    "as you can in one sentence. The library is open from nine in the morning to six in the evening, from Monday "
    "to Saturday. Books can be kept for four weeks, and the loan can be extended twice if nobody else has asked "
    "for the book. A lost book is replaced by whoever lost it. The reading room is on the second floor, next to "
    "the map collection. Children under twelve need a signature of a parent for their first card. Computers are "
    "free for half an hour; after that somebody else may ask for the seat. Food is not allowed near the shelves, "
    "but there is a small kitchen downstairs."
)
"""What all questions to the library begin with."""

DOCUMENT = (
    "Report on the harbour bridge. The bridge was closed on the third of March after an inspector found cracks in "
    "two of its eleven supports. The supports were cast in winter, and the concrete had been mixed with too much "
    "water so that it would flow in the cold. Over the years salt entered the pores and the steel inside began to "
    "rust. The town council asked three companies for an offer. The first wanted to replace the whole bridge "
    "within two years. The second offered to repair the two supports within four months and to examine the other "
    "nine every spring. The third offered a ferry for as long as the repair would take, but no repair. The "
    "council chose the second offer and hired the ferry of the third company until the work was done. The bridge "
    "was opened again on the ninth of July. Since then lorries heavier than twelve tonnes have had to use the "
    "northern road. The cost of the repair was shared between the town, which paid one half, and the harbour, "
    "which paid the other half."
)
"""What the questions about the bridge begin with."""

_QUESTIONS = (
    "When do you close on Friday?",
    "How long may I keep a book?",
    "Where is the reading room?",
    "I lost a book. What happens now?",
    "May my eight year old son have a card?",
    "Can I eat my sandwich between the shelves?",
    "How long may I use a computer?",
    "What is the capital of Italy?",
)

_ABOUT_THE_DOCUMENT = (
    "Why was the bridge closed?",
    "How many supports does the bridge have?",
    "Which offer did the council choose?",
    "When was the bridge opened again?",
    "Who paid for the repair?",
    "Which vehicles must use the northern road?",
)

_CHATS = (
    (
        "I would like to learn to bake bread. What do I need?",
        "You need flour, water, salt and yeast, and an oven that gets really hot.",
        "How long does the dough have to rest?",
    ),
    (
        "My bicycle makes a noise when I brake.",
        "Dirt on the rims or worn brake pads are the usual causes. Clean the rims first.",
        "I did. It is still there. What next?",
    ),
    (
        "Name a bird that cannot fly.",
        "A penguin cannot fly, but it swims very well.",
        "Name another one.",
    ),
)


def all_prompts() -> dict[str, list[Message]]:
    """Return twenty prompts by name, in the order in which they are asked."""
    found: dict[str, list[Message]] = {}
    for number, question in enumerate(_QUESTIONS):
        found[f"library-{number + 1}"] = [_message("system", SYSTEM), _message("user", question)]
    for number, question in enumerate(_ABOUT_THE_DOCUMENT):
        found[f"bridge-{number + 1}"] = [
            _message("system", "Answer with one short sentence, from the report alone.\n\n" + DOCUMENT),
            _message("user", question),
        ]
    for number, (first, answer, second) in enumerate(_CHATS):
        opening = [_message("system", "You are a friendly and helpful assistant."), _message("user", first)]
        found[f"chat-{number + 1}a"] = opening
        found[f"chat-{number + 1}b"] = [*opening, _message("assistant", answer), _message("user", second)]
    return found


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

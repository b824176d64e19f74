"""The words in which problems are put: phrases with alternatives, and frames around them."""

import random
import re
from typing import NamedTuple


class Wording(NamedTuple):
    """How a problem is put: imperatives begin with a verb, questions are whole. The last of each is for the test."""

    imperatives: tuple[str, ...]
    questions: tuple[str, ...]


# Alternatives that several phrases have.
_NAMED = {
    "<word>": '[|the word ][{word}|"{word}"]',
    "<letter>": '[{letter}|"{letter}"]',
    "<letters>": "[{letter}'s|{letter}s|{letter}]",
    "<compute>": "[calculate|compute|solve|evaluate|work out|figure out]",
    "<up>": "[in [ascending|increasing] order|ascending|from low to high|from smallest to largest|smallest first]",
    "<down>": "[in [descending|decreasing] order|descending|from high to low|from largest to smallest|largest first]",
    "<abc>": "[alphabetically|in alphabetical order|from a to z|by alphabet]",
    "<around>": "[in reverse order|in reverse|backwards|the other way round|last first]",
}
# [one|another] stands for any of its parts.
_WORDINGS = {
    "add": Wording(
        (
            "add {a} and {b}",
            "add {b} to {a}",
            "add up {a} and {b}",
            "[sum|sum up|total] {a} and {b}",
            "<compute> {a} [+|plus] {b}",
            "[calculate|compute|work out|give me|tell me] the [sum|total] of {a} and {b}",
            "[give me|tell me|say] what {a} [+|plus] {b} [is|makes|gives|equals]",
            "find the sum of {a} and {b}",
        ),
        (
            "[what is|what's|whats] {a} [+|plus] {b}?",
            "{a} [+|plus] {b}?",
            "{a} [+|plus] {b} = ?",
            "{a}+{b}[|=|=?]",
            "{a} + {b} =",
            "[how much|how many] [is|are|makes] {a} [plus|and|+] {b}?",
            "[what is|what's] the [sum|total] of {a} and {b}?",
            "what do {a} and {b} [add up to|give|make]?",
            "what do [I|you|we] get [if|when] [I|you|we] add {a} and {b}?",
            "what does {a} [+|plus] {b} [equal|make|give|come to]?",
            "how much do {a} and {b} make together?",
        ),
    ),
    "subtract": Wording(
        (
            "[subtract|take|deduct] {b} from {a}",
            "<compute> {a} [-|minus] {b}",
            "take {b} away from {a}",
            "[give me|tell me|say] what {a} [-|minus] {b} [is|makes|gives|equals]",
            "[calculate|find|give me|tell me] the difference [of|between] {a} and {b}",
            "compute the difference {a} minus {b}",
        ),
        (
            "[what is|what's|whats] {a} [-|minus] {b}?",
            "{a} [-|minus] {b}?",
            "{a} [-|minus] {b} = ?",
            "{a}-{b}[|=|=?]",
            "{a} - {b} =",
            "how much is {a} [-|minus|less] {b}?",
            "what is [left|left over] of {a} if [I|you|we] [take away|remove|subtract] {b}?",
            "what does {a} [-|minus] {b} [equal|make|give|come to]?",
            "[what is|what's] the difference [of|between] {a} and {b}?",
            "what do [I|you|we] get [if|when] [I|you|we] [subtract|take] {b} from {a}?",
            "what remains when {b} is taken from {a}?",
        ),
    ),
    "multiply": Wording(
        (
            "multiply {a} [by|with|and|times] {b}",
            "<compute> {a} [x|*|times] {b}",
            "[calculate|compute|give me|tell me] the product of {a} and {b}",
            "[give me|tell me|say] what {a} [x|*|times] {b} [is|makes|gives|equals]",
            "find the product of {a} and {b}",
        ),
        (
            "[what is|what's|whats] {a} [x|*|times] {b}?",
            "{a} [x|*|times] {b}?",
            "{a} [x|*|times] {b} = ?",
            "{a}[x|*]{b}[|=|=?]",
            "{a} [x|*] {b} =",
            "how much is {a} [x|*|times|multiplied by] {b}?",
            "[what is|what's] the product of {a} and {b}?",
            "what does {a} [x|*|times] {b} [equal|make|give|come to]?",
            "what do [I|you|we] get [if|when] [I|you|we] multiply {a} by {b}?",
            "what do I get for {a} multiplied by {b}?",
        ),
    ),
    "ascending": Wording(
        (
            "[sort|order|arrange|put in order|rank] [|these:|these numbers:|the numbers|this list:] {items}",
            "[sort|order|arrange|rank|list] [these numbers|the numbers|this list] [|<up>]: {items}",
            "[sort|order|arrange|rank|put|write|list] {items} <up>",
            "[sort|list|rank] [in ascending order|ascending|from low to high|in increasing order]: {items}",
            "put [these numbers|these|the following numbers] in [order|ascending order|the right order]: {items}",
            "order these numbers from smallest to largest: {items}",
            "list these numbers from the smallest to the largest: {items}",
        ),
        (
            "what is the [right|ascending|sorted] order of {items}?",
            "how [do|would] you [sort|order|arrange] {items}?",
            "what is {items} [in ascending order|sorted|sorted from low to high|when sorted|in order]?",
            "what are these numbers [in ascending order|sorted|in order|from low to high]: {items}?",
            "what is {items} from smallest to largest?",
        ),
    ),
    "descending": Wording(
        (
            "[sort|order|arrange|rank|list] [these numbers|the numbers|this list] <down>: {items}",
            "[sort|order|arrange|rank|put|write|list] {items} <down>",
            "[sort|list|rank] [in descending order|descending|from high to low|in decreasing order]: {items}",
            "put [these numbers|these|the following numbers] in descending order: {items}",
            "order these numbers from largest to smallest: {items}",
            "list these numbers from the largest to the smallest: {items}",
        ),
        (
            "what is the descending order of {items}?",
            "how [do|would] you [sort|order|arrange] {items} [in descending order|from high to low|largest first]?",
            "what is {items} [in descending order|sorted from high to low|in decreasing order]?",
            "what are these numbers [in descending order|from high to low|largest first]: {items}?",
            "what is {items} from largest to smallest?",
        ),
    ),
    "alphabetical": Wording(
        (
            "[sort|order|arrange] [|these:|these words:|the words|this list:|the following:] {items}",
            "[sort|order|arrange|list] [these words|the words|this list] [|<abc>]: {items}",
            "[sort|order|arrange|put|write|list] {items} <abc>",
            "[sort|list] [alphabetically|in alphabetical order|from a to z]: {items}",
            "put [these words|these|the following words] in [order|alphabetical order]: {items}",
            "alphabetize {items}",
            "order these words by the alphabet: {items}",
        ),
        (
            "what is the alphabetical order of {items}?",
            "how [do|would] you [sort|order|arrange] {items}[| <abc>]?",
            "which of {items} comes first in the alphabet, and which next?",
            "what are these words [in alphabetical order|sorted|from a to z]: {items}?",
            "what is {items} in alphabetical order?",
        ),
    ),
    "spell": Wording(
        (
            'spell [|out ][|the word |the name ][{word}|"{word}"]',
            "spell <word> [letter by letter|one letter at a time|out|for me]",
            "[write|say|type] <word> [letter by letter|one letter at a time|with dashes]",
            "[list|name|give me|tell me|show me] [|all ]the letters of <word>",
            "[tell|show] me [how to spell|how you spell|the spelling of] <word>",
            "tell me how to spell {word}",
        ),
        (
            "how [do|would|can] [you|I|we] [spell|spell out|write] <word>?",
            "how is <word> [spelled|spelt|written]?",
            "[what are|which are] the letters [of|in] <word>?",
            "what is the spelling of <word>?",
            "what letters [make up|are in|form|does it take to write] <word>?",
            "which letters does {word} consist of?",
        ),
    ),
    "backwards": Wording(
        (
            '[reverse|invert|flip] [|the word |the letters of |the string ][{word}|"{word}"]',
            "[write|spell|say|type] <word> [backwards|backward|in reverse|the other way round]",
            "[turn|flip] <word> around",
            "[give me|tell me|show me] <word> [backwards|reversed|in reverse]",
            "write the word {word} from back to front",
        ),
        (
            "[what is|what's] <word> [backwards|backward|reversed|in reverse]?",
            "what is the reverse of <word>?",
            "how [do|would] you [write|spell|say] <word> [in reverse|backward]?",
            "how do you write {word} backwards?",
        ),
    ),
    "reverse": Wording(
        (
            "reverse [|this list: |the list |the order of |the order of this list: |these: ]{items}",
            "[write|list|say|give me|put] {items} <around>",
            "[list|write|say] [these|this list|the following] <around>: {items}",
            "[turn|flip] [the list|this list:] {items} around",
            "say {items} in the opposite order",
        ),
        (
            "[what is|what's] [|the list ]{items} [in reverse order|in reverse|reversed|backwards]?",
            "what is the reverse [|order ]of [|the list ]{items}?",
            "how does the list {items} look in reverse?",
            "how do you reverse [|the list ]{items}?",
            "what is {items}, starting with the last?",
        ),
    ),
    "count": Wording(
        (
            "count the letter <letter> in <word>",
            "count [how often|how many times] [|the letter ]<letter> [occurs|appears|is] in <word>",
            "count [|all ]the {letter}['s|s] in <word>",
            "[tell me|say] how many <letters> [are in|there are in] <word>",
            "find the number of {letter}'s in <word>",
            "tell me how many {letter}'s {word} has",
        ),
        (
            "how many [{letter}'s|{letter}s|{letter}|letters {letter}] [are|are there] in <word>?",
            "how many <letters> does <word> [have|contain]?",
            "how [many times|often] does [|the letter ]<letter> [occur|appear] in <word>?",
            "how [many times|often] is [|the letter ]{letter} in <word>?",
            "[what is|what's] the number of {letter}'s in {word}?",
            "how often is there an {letter} in the word {word}?",
        ),
    ),
    "length": Wording(
        (
            "count [|all ]the [letters|characters] [in|of] <word>",
            "[tell me|say|find out] how [long|many letters long] <word> is",
            "[give|tell] me the number of letters [in|of] <word>",
            "find the length of <word>",
            "tell me the length of {word}",
        ),
        (
            "how many [letters|characters] [does <word> have|are in <word>|are there in {word}]?",
            'how many letters [has|are there in the word|make up|in] [{word}|"{word}"]?',
            "[what is|what's] the [length|number of letters] of <word>?",
            "of how many letters does <word> consist?",
            "how long is the word {word}?",
        ),
    ),
    "other": Wording(
        (
            "{text}",
            "tell me about {text}",
            "write a [poem|story|letter] about {text}",
            "explain {text}",
            "translate {text}",
        ),
        (
            "[hello|hi|hey|good morning|good evening]",
            "[thanks|thank you!|bye|ok|yes|no]",
            "[how are you?|who are you?|what are you?|what can you do?|what do you know?|help]",
            "[what is|what are|who was|where is|why is|when was] {text}?",
            "[why|how] {text}?",
            "do you [like|know] {text}?",
            "can you help me?",
        ),
    ),
}
KINDS = tuple(_WORDINGS)
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_IMPERATIVES = (
    "{verb}[|.|!]",
    "{verb}[|.|!]",
    "please {verb}[|.]",
    "{verb}[, | ]please[|.]",
    "[can|could|would|will] you [|please |kindly ]{verb}?",
    "[can|could] you {verb} for me?",
    "I[ want| need| would like|'d like] you to {verb}.",
    "[hi!|hello!|hey,|ok,|now|next,|so,|then] {verb}[|.]",
    "{verb}. [thanks!|thank you.]",
)
_QUESTIONS = (
    "{text}",
    "{text}",
    "{text}",
    "[tell me|please tell me|do you know|quick question|question|I wonder]: {text}",
    "[hi,|hello,|hey,|and|ok,|so|now] {text}",
    "{text} [thanks!|please.]",
)


def phrase(chance: random.Random, kind: str, other_words: bool) -> str:
    """Return the words of a problem of `kind`, with its values in braces: those for the test if `other_words`."""
    wording = _WORDINGS[kind]
    imperative = chance.random() < 0.5
    phrases = wording.imperatives if imperative else wording.questions
    chosen = phrases[-1]
    while not other_words and chosen == phrases[-1]:
        chosen = _choose(chance, chance.choice(phrases[:-1]))
    frame = _choose(chance, chance.choice(_IMPERATIVES if imperative else _QUESTIONS))
    text = frame.format(verb=chosen, text=chosen)
    if chance.random() < 0.1:
        text = text.rstrip(".?!")
    return text[0].upper() + text[1:] if chance.random() < 0.6 else text


def _choose(chance: random.Random, text: str) -> str:
    """Return `text` with one part of each of its alternatives."""
    for name, parts in _NAMED.items():
        text = text.replace(name, parts)
    while (chosen := _ALTERNATIVES.sub(lambda found: chance.choice(found[1].split("|")), text)) != text:
        text = chosen
    return " ".join(text.split())

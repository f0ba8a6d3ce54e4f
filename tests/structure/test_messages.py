"""Tests that messages are found: with placeholders and joined literals, without docstrings and comments."""

import pytest
from structure.messages import Message, messages

CPP = {
    "a literal": ('fail({.what = "no tile"});', [Message(1, "no tile")]),
    "joined literals": ('\nf("no "\n  // why\n  "tile");', [Message(2, "no tile")]),
    "two arguments": ('f("no tile", "no unit");', [Message(1, "no tile"), Message(1, "no unit")]),
    "a raw literal": ('auto t = R"x(no "tile")x";', [Message(1, 'no "tile"')]),
    "no words": ('#include "kernels/a.h"\nf("word", \' \', "  ", "{} {}");', []),
    "a comment": ('// no "such tile"\n', []),
}

PYTHON = {
    "a string": ("refuse('no tile')", [Message(1, "no tile")]),
    "an f-string": ("refuse(f'no {tile} ' f'of {unit.name!r:>5}')", [Message(1, "no {} of {}")]),
    "a string inside": ("f'{\"no tile\" if x else 1}'", [Message(1, "no tile")]),
    "joined strings": ("refuse('no '\n    'tile')", [Message(1, "no tile")]),
    "a docstring": ("'''A module of words.'''\ndef f():\n    '''Some words.'''\n", []),
}


@pytest.mark.parametrize("name", CPP)
def test_messages_of_cpp(name):
    text, expected = CPP[name]
    assert messages("x.cpp", text) == expected


@pytest.mark.parametrize("name", PYTHON)
def test_messages_of_python(name):
    text, expected = PYTHON[name]
    assert messages("x.py", text) == expected

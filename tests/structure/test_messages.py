"""Tests that messages are found: with placeholders and joined literals, without docstrings and comments."""

import pytest
from structure.messages import Message, messages, without_help

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


HELP = {
    "x.py": {
        "refuse('no tile')": [1],
        "\nrefuse('no tile', where='here')": [2],
        "refuse('no tile', needed='a tile')": [],
        "refuse('no tile', remedy='Make a tile.')": [],
        "refuse('no tile', **more)": [],
        "refuse_unsupported('no tile')": [1],
        "fail('out_of_order', 'no tile')": [1],
        "fail('out_of_order', 'no tile', needed='a tile')": [],
        "fail('drive_full', 'no tile')": [],  # its code has a remedy
        "field.refuse('a tile')": [],  # says what is needed
    },
    "x.cpp": {
        'fail(Code::bad_argument, {.what = "no tile"});': [1],
        '\nrequire(a, Code::unsupported, [&] { return Problem{.what = name("no tile; "), .where = b}; });': [2],
        'require(a, Code::unsupported, [&] { return Problem{.what = "no tile", .needed = "a tile"}; });': [],
        'fail(Code::bad_argument, {.what = "no tile", .remedy = "Make a tile."});': [],
        'fail(Code::drive_full, {.what = "no tile"});': [],
        "if (code == Code::bad_argument) { f(); }": [],
        "fail(Code::bad_argument, problem);": [],
    },
}


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in HELP.items() for text in texts])
def test_errors_without_help_are_found(path, text):
    assert without_help(path, text) == HELP[path][text]

"""Tests that functions are found with their lines and parameters."""

import pytest
from structure.source import Function, functions

CASES = {
    "a function": ("int f(int a, int b) {\n  return a;\n}\n", [Function(1, "f", 3, 2)]),
    "no parameters": ("int f() {}\nint g(void) {}\n", [Function(1, "f", 1, 0), Function(2, "g", 1, 0)]),
    "a declaration": ("void f(std::map<int, int> a, int b = g(1, 2));\n", [Function(1, "f", 0, 2)]),
    "inside scopes": (
        "namespace a::b {\nclass C final : public D<int> {\n public:\n  int f() const override { return 1; }\n};\n}\n",
        [Function(4, "f", 1, 0)],
    ),
    "a template": ("template <class T, class U>\n  requires(big<T>)\nvoid f(T t) {\n}\n", [Function(1, "f", 4, 1)]),
    "attributes": ('[[gnu::target_clones("a", "b")]] void f(int a) {}\n', [Function(1, "f", 1, 1)]),
    "a kernel": ("__global__ void __launch_bounds__(256, 2) f(int a) {}\n", [Function(1, "f", 1, 1)]),
    "an initializer list": ("A::A(int a) : a_{a}, b_{a, 1}, c_(2) {\n  f();\n}\n", [Function(1, "A", 3, 1)]),
    "operators": (
        "bool operator==(A a, A b) {}\nint operator()(int a) {}\n",
        [Function(1, "operator==", 1, 2), Function(2, "operator()", 1, 1)],
    ),
    "a trailing return type": ("auto f(int a) -> std::vector<int> {}\n", [Function(1, "f", 1, 1)]),
    "a default argument in braces": (
        "void f(A a = {}, B b = {1, 2}) {}\nint g() {}\n",
        [Function(1, "f", 1, 2), Function(2, "g", 1, 0)],
    ),
    "braces inside": (
        "void f() {\n  if (x) {\n  }\n  auto l = [] {};\n}\nint g();\n",
        [Function(1, "f", 5, 0), Function(6, "g", 0, 0)],
    ),
    "values": ("int a = f(1);\nA b{1, 2};\nint c[] = {1};\nenum class E : int { x = 1 };\nusing T = int (*)(int);", []),
    "preprocessor lines": ("#if X(1)\n#define F(a) \\\n  { a\n#endif\nint f() {}\n", [Function(5, "f", 1, 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_functions_of_cpp(name):
    text, expected = CASES[name]
    assert functions("x.cpp", text) == expected


def test_functions_of_python():
    assert functions("x.py", "class A:\n    def f(self, a, *, b):\n        pass\n") == [Function(2, "f", 2, 3)]

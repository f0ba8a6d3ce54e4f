// A product in plain C++, blocked so that it runs from caches: for machines without a library for matrices, and for what a
// library does not know.
#pragma once

#include "examples/gpt/matrix.h"

namespace ballast::gpt {

void multiply_portable(const Product& product);

}  // namespace ballast::gpt

// A product in plain C++, blocked for caches: for machines without a matrix library, and for products that the library
// does not support.
#pragma once

#include "examples/gpt/matrix.h"

namespace ballast::gpt {

void multiply_portable(const Product& product);

}  // namespace ballast::gpt

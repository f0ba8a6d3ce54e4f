// Products of matrices on one CPU thread, by oneDNN. The bits of a product depend on its shape and on the processor only.
#pragma once

#include "examples/llama/maths.h"

namespace ballast::llama {

std::string multiplier_name();

void multiply_on_this_thread(const Product& product);

}  // namespace ballast::llama

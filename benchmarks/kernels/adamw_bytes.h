// What AdamW moves, on any device.
#pragma once

#include <ballast/state_format.h>

namespace ballast::benchmarks {

// Returns the bytes that one step has to move for an element, read and written together.
double adamw_bytes_of_an_element(StateFormat format);

}  // namespace ballast::benchmarks

// Values on one CPU thread: products of matrices, by oneDNN, whose bits depend on shapes and on the processor only; and conversions.
#pragma once

#include "examples/llama/maths.h"

namespace ballast::llama {

std::string multiplier_name();

void multiply_on_this_thread(const Product& product);

namespace rows {

using Row = std::span<float>;
using ConstRow = std::span<const float>;

// Between fp32 and the format of a view, from its element `first` on. Values are rounded to nearest, ties to even.
void read(const ConstView& from, std::size_t first, Row to);
void write(ConstRow from, const View& to, std::size_t first);
void add_to(const View& to, std::size_t first, ConstRow more);  // sums in fp32 and rounds once

}  // namespace rows
}  // namespace ballast::llama

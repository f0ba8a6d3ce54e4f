// Products where oneDNN is missing: right and slow, enough to compare with a GPU.
#include "examples/llama/multiply.h"

#include <vector>

namespace ballast::llama {

std::string multiplier_name() { return "loops (oneDNN was not found)"; }

void multiply_on_this_thread(const Product& p) {
  const auto value = [](const ConstMatrix& m, std::size_t row, std::size_t column) {
    float read = 0;
    rows::read(m.memory, row * m.row_step() + column * m.column_step(), {&read, 1});
    return read;
  };
  std::vector<float> sums(p.to.columns), b(p.b.rows * p.b.columns);
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = value(p.b, i / p.b.columns, i % p.b.columns);
  for (std::size_t row = 0; row < p.to.rows; ++row) {
    sums.assign(p.to.columns, 0.0f);
    for (std::size_t step = 0; step < p.a.columns; ++step) {
      const float a = value(p.a, row, step);
      for (std::size_t column = 0; column < sums.size(); ++column)
        sums[column] += a * b[step * sums.size() + column];
    }
    p.add ? rows::add_to(p.to.memory, row * p.to.stride, sums) : rows::write(sums, p.to.memory, row * p.to.stride);
  }
}

}  // namespace ballast::llama

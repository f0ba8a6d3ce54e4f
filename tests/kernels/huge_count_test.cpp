// Tests with more than 2^31 elements, in sparse memory.
#include "kernels/pieces.h"
#include "tests/kernels/sparse_memory.h"
#include "tests/kernels/test_backends.h"
#include "tests/skip.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t huge_count = (std::size_t{1} << 31) + 100'003;

}  // namespace

TEST_CASE("searches and sums reach all of more than 2^31 elements") {
  const SparseMemory memory(2 * huge_count);
  if (!memory.exists()) {
    return skip("no 4 GiB of address space");
  }
  auto* values = reinterpret_cast<std::uint16_t*>(memory.data());
  const View view(memory.data(), huge_count, DType::bf16);
  const std::unique_ptr<Backend> on = cpu_backend();
  values[0] = 0x3f80;               // 1
  values[huge_count - 1] = 0x4000;  // 2
  ExactSum sum;
  on->sum_of_squares(view, &sum);
  CHECK(value(sum) == 5);
  values[huge_count - 1] = 0x7f80;
  std::uint64_t first = no_index;
  on->first_non_finite(view, 10, &first);
  CHECK(first == huge_count + 9);
}

TEST_CASE("pieces cover more than 2^32 elements, each at its place") {
  const std::size_t many = (std::size_t{1} << 33) + 5;
  std::size_t sum = 0;
  std::size_t end = 0;
  each_piece(Threads(1), many, [&](std::size_t first, std::size_t piece) {
    sum += piece;
    end = std::max(end, first + piece);
  });
  CHECK(sum == many);
  CHECK(end == many);
  const SparseMemory memory(4 * many);
  if (!memory.exists()) {
    return skip("no 32 GiB of address space");
  }
  const View view(memory.data(), many, DType::fp32);
  CHECK(numbers(view, many - 1, 1).data == memory.data() + 4 * (many - 1));
  CHECK(quantized_bytes(many, CodeBits::four) == (many / 128 + 1) * 68);
  CHECK(block_count(many) == many / 128 + 1);
}

}  // namespace ballast::kernels

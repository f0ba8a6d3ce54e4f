#include "tests/kernels/device_backends.h"

namespace ballast::kernels {
namespace {

std::uint64_t search_on(TestBackend& on, const Patterns& patterns, DType dtype, std::uint64_t first_index = 0,
                        std::uint64_t found_before = no_index) {
  const Placed values(on, patterns, dtype, patterns.size() % 5);
  const PlacedValue<std::uint64_t> first(on, found_before);
  on.kernels().first_non_finite(values.view(), first_index, first.get());
  return first.read();
}

constexpr std::uint32_t bad_patterns[3][4] = {{0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu},
                                              {0x7f80, 0xff80, 0x7f81, 0xffff},
                                              {0x7c00, 0xfc00, 0x7c01, 0xffff}};
constexpr std::uint32_t largest_patterns[3] = {0xff7fffffu, 0xff7f, 0xfbff};

void searches_in_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    const std::size_t kind = count % 3;
    const DType dtype = floating_dtypes[kind];
    Patterns patterns(count, largest_patterns[kind]);
    REQUIRE(search_on(on, patterns, dtype) == no_index);
    for (const std::size_t at : {count / 2, count * 7 / 8, count - 1, std::size_t{0}}) {
      if (at < count) {
        const std::uint64_t earlier = search_on(on, patterns, dtype);
        patterns[at] = bad_patterns[kind][(count + at) % 4];
        REQUIRE(search_on(on, patterns, dtype) == std::min<std::uint64_t>(earlier, at));
      }
    }
  }
}

void searches_in_many(TestBackend& on) {
  for (const DType dtype : floating_dtypes) {
    const auto kind = static_cast<std::size_t>(dtype);
    Patterns patterns(400'001);
    CHECK(search_on(on, patterns, dtype, 7) == no_index);
    for (const std::size_t at : {400'000u, 399'999u, 131'072u, 131'071u, 65'600u, 3u}) {
      patterns[at] = bad_patterns[kind][at % 4];
      CHECK(search_on(on, patterns, dtype, 1'000) == at + 1'000);
    }
    CHECK(search_on(on, patterns, dtype, 1'000, 1'002) == 1'002);
    CHECK(search_on(on, patterns, dtype, std::uint64_t{1} << 40) == (std::uint64_t{1} << 40) + 3);
  }
}

// Two threads find something at the same time. The first position has to win.
void races(TestBackend& on) {
  constexpr std::size_t task = 65'536;
  Patterns patterns(4 * task);
  for (std::size_t end = task; end <= patterns.size(); end += task) {
    patterns[end - 1] = 0x7f80;
  }
  const Placed values(on, patterns, DType::bf16);
  for (std::size_t i = 0; i < 100; i += on.every(11)) {
    const PlacedValue<std::uint64_t> first(on, no_index);
    on.kernels().first_non_finite(values.view(), 0, first.get());
    REQUIRE(first.read() == task - 1);
  }
}

void agrees_with_definition(TestBackend& on) {
  const auto distance = static_cast<std::uint32_t>(3 * on.every(61));
  for (const DType dtype : floating_dtypes) {
    for (std::uint32_t pattern = 0; pattern < 0x10000; pattern += distance) {
      const std::uint32_t wide = dtype == DType::fp32 ? pattern << 16 | (pattern & 1) : pattern;
      const std::uint64_t expected = is_finite(dtype, wide) ? no_index : 0;
      if (search_on(on, {wide}, dtype) != expected) {
        FAIL(name(dtype) << " pattern " << wide);
      }
    }
  }
}

}  // namespace

TEST_CASE("the first NaN or infinity of 0 to 1,100 elements is found") { on_every_isa(searches_in_few); }
TEST_CASE("the first NaN or infinity is found by any number of threads") { on_every_cpu(searches_in_many); }
TEST_CASE("of the NaNs and infinities that several threads find, the first one wins") { on_every_cpu(races); }
TEST_CASE("patterns count as NaN or infinity as their format defines") { on_every_isa(agrees_with_definition); }

TEST_CASE("CUDA's threads find the first NaN or infinity") {
  for (auto* const test : {searches_in_few, searches_in_many, agrees_with_definition}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA finds the first NaN or infinity", "[gpu]") {
  for (auto* const test : {searches_in_few, searches_in_many, agrees_with_definition}) {
    on_cuda(test);
  }
}

}  // namespace ballast::kernels

// Tests of NaN and infinity in a gradient or a state: they come out where they went in, and no other element changes.
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"
#include "tests/kernels/update_reference.h"

using namespace ballast;
using namespace ballast::kernels;
using ballast::DType;

namespace {

constexpr std::size_t elements = 700;
constexpr std::size_t bad = 300;  // an element in the third of six groups
constexpr std::size_t bad_group = bad / group_size;

const Rule& adamw() {
  static const Rule rule = sample_rules().front();
  return rule;
}

void step(UpdateMemory& memory, const Rule& rule, simd::Isa isa) {
  const std::vector<Run> runs{{0, memory.tile().count, 0}};
  const std::vector<GroupStep> groups{{.rule = rule}};
  cpu_backend({.threads = 1, .isa = isa})->update(memory.tile(), runs, groups);
}

void put_gradient(const TileMemory& tile, std::size_t i, std::uint32_t fp32_pattern) {
  auto* gradient = const_cast<std::byte*>(tile.gradient);
  const auto half = static_cast<std::uint16_t>(tile.gradient_dtype == DType::bf16 ? fp32_pattern >> 16
                                               : (fp32_pattern & 0x7fffffu) == 0  ? 0x7c00u
                                                                                  : 0x7fffu);
  if (tile.gradient_dtype == DType::fp32) {
    std::memcpy(gradient + 4 * i, &fp32_pattern, 4);
  } else {
    std::memcpy(gradient + 2 * i, &half, 2);
  }
}

double parameter_of(const TileMemory& tile, std::size_t i) {
  if (tile.parameter_dtype == DType::fp32) {
    float value;
    std::memcpy(&value, tile.parameter + 4 * i, 4);
    return double{value};
  }
  std::uint16_t half;
  std::memcpy(&half, tile.parameter + 2 * i, 2);
  return tile.parameter_dtype == DType::bf16 ? bf16_value(half) : fp16_value(half);
}

bool same_element(const TileMemory& a, const TileMemory& b, std::size_t i, const Rule& rule) {
  const Element x = state_of(a, i, rule);
  const Element y = state_of(b, i, rule);
  return x.parameter == y.parameter && x.momentum == y.momentum && x.variance == y.variance &&
         parameter_of(a, i) == parameter_of(b, i);
}

// Returns whether element i may be lost with the bad one: the bad element itself, and in formats with scales its
// group's moments.
bool belongs_to_bad(StateFormat format, std::size_t i) {
  return has_scales(format) ? i / group_size == bad_group : i == bad;
}

template <class Check>
void for_each_case(const Check& check) {
  for (const StateFormat format : all_state_formats) {
    for (UpdateShape shape : sample_shapes(format)) {
      shape.count = elements;
      for (const simd::Isa isa : simd::usable_isas()) {
        for (const Rule& rule : sample_rules()) {
          if (std::holds_alternative<External>(rule)) continue;  // reads no gradient
          INFO(name(format) << ", parameter " << name(shape.parameter_dtype) << ", gradient "
                            << name(shape.gradient_dtype) << ", rule " << rule.index() << ", " << simd::name(isa));
          check(shape, isa, rule);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("a NaN in the gradient makes its parameter NaN, and touches no other element") {
  for_each_case([](const UpdateShape& shape, simd::Isa isa, const Rule& rule) {
    for (const std::uint32_t nan : {0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      UpdateMemory clean(shape);
      UpdateMemory dirty(shape);
      put_gradient(dirty.tile(), bad, nan);
      step(clean, rule, isa);
      step(dirty, rule, isa);
      if (std::holds_alternative<Lion>(rule)) {
        CHECK(std::isnan(state_of(dirty.tile(), bad, rule).momentum));  // the sign of NaN is zero, for one step
      } else {
        CHECK(std::isnan(parameter_of(dirty.tile(), bad)));
        CHECK(std::isnan(state_of(dirty.tile(), bad, rule).parameter));
      }
      for (std::size_t i = 0; i < elements; ++i) {
        if (!belongs_to_bad(shape.format, i)) REQUIRE(same_element(clean.tile(), dirty.tile(), i, rule));
      }
    }
  });
}

TEST_CASE("a NaN stays NaN in later steps, in every format") {
  for_each_case([](const UpdateShape& shape, simd::Isa isa, const Rule& rule) {
    UpdateMemory memory(shape);
    put_gradient(memory.tile(), bad, 0x7fffffffu);
    step(memory, rule, isa);
    put_gradient(memory.tile(), bad, 0);
    for (int later = 0; later < 5; ++later)
      step(memory, rule, isa);
    const bool forgets = std::holds_alternative<Lion>(rule);
    CHECK((forgets || std::isnan(parameter_of(memory.tile(), bad))));
  });
}

TEST_CASE("where moments share a scale a NaN makes those of its group NaN, and not yet the group's parameters") {
  const UpdateShape shape{.format = GENERATE(StateFormat::compact, StateFormat::four_bit), .count = elements};
  UpdateMemory clean(shape);
  UpdateMemory dirty(shape);
  put_gradient(dirty.tile(), bad, 0x7fc00000u);
  step(clean, adamw(), simd::usable_isas().front());
  step(dirty, adamw(), simd::usable_isas().front());
  CHECK(std::isnan(dirty.tile().momentum_scales[bad_group]));
  CHECK(std::isnan(dirty.tile().variance_scales[bad_group]));
  for (std::size_t i = bad_group * group_size; i < (bad_group + 1) * group_size; ++i) {
    if (i != bad) REQUIRE(parameter_of(clean.tile(), i) == parameter_of(dirty.tile(), i));
  }
}

TEST_CASE("an infinite gradient results in infinity or NaN, and touches no other element") {
  for_each_case([](const UpdateShape& shape, simd::Isa isa, const Rule& rule) {
    UpdateMemory clean(shape);
    UpdateMemory dirty(shape);
    put_gradient(dirty.tile(), bad, 0x7f800000u);
    step(clean, rule, isa);
    step(dirty, rule, isa);
    const bool seen =
        !std::isfinite(parameter_of(dirty.tile(), bad)) || !std::isfinite(state_of(dirty.tile(), bad, rule).momentum);
    CHECK(seen);
    for (std::size_t i = 0; i < elements; ++i) {
      if (!belongs_to_bad(shape.format, i)) REQUIRE(same_element(clean.tile(), dirty.tile(), i, rule));
    }
  });
}

TEST_CASE("the largest finite master keeps its value although its bf16 parameter is infinite") {
  UpdateMemory memory({.format = StateFormat::split, .count = elements});
  const TileMemory tile = memory.tile();
  const std::uint16_t infinity = 0x7f80;
  const std::int16_t below = -1;
  std::memcpy(tile.parameter, &infinity, 2);
  std::memcpy(tile.master, &below, 2);
  step(memory, Sgd{.lr = 0.0f, .l2 = 0.0f}, simd::usable_isas().front());
  CHECK(state_of(memory.tile(), 0, Sgd{}).parameter == 0x1.fffffep127);
}

// Arithmetic on subnormal numbers is several times slower, and a large part of the rows of an embedding has no gradient.
#if defined(__SSE__)
TEST_CASE("an update of elements without gradients has no subnormal numbers") {
  constexpr unsigned subnormal_flags = 0x0012;  // of an argument, and of a result
  for_each_case([](const UpdateShape& shape, simd::Isa isa, const Rule& rule) {
    UpdateShape whole_groups = shape;
    whole_groups.count = elements / group_size * group_size;
    UpdateMemory memory(whole_groups);
    std::ranges::fill(memory.bytes(), std::byte{0});
    const TileMemory tile = memory.tile();
    std::memset(tile.parameter, 0x3c, tile.count * byte_size(tile.parameter_dtype));
    for (int i = 0; i < 3; ++i)
      step(memory, rule, isa);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~subnormal_flags);
    step(memory, rule, isa);
    CHECK((_mm_getcsr() & subnormal_flags) == 0);
    _mm_setcsr(before);
  });
}
#endif

// Tests of rules that make a direction: against doubles, and bit by bit on every device.
#include <cmath>

#include "tests/kernels/device_backends.h"
#include "tests/kernels/update_memory.h"
#include "tests/kernels/update_reference.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

const Rule with_nesterov = MuonMomentum{.mean = RunningMean::of(0.95), .from_momentum = 0.95f, .from_gradient = 0.05f};
const Rule without = MuonMomentum{.mean = RunningMean::of(0.95), .from_momentum = 1.0f, .from_gradient = 0.0f};

TileMemory direction_tile(UpdateMemory& memory, std::byte* base) {
  TileMemory tile = memory.tile_at(base);
  tile.master = nullptr;
  tile.variance = nullptr;
  tile.variance_scales = nullptr;
  return tile;
}
TileMemory direction_tile(UpdateMemory& memory) { return direction_tile(memory, memory.bytes().data()); }

double direction_at(const TileMemory& tile, std::size_t i) {
  std::uint16_t pattern;
  std::memcpy(&pattern, tile.parameter + 2 * i, 2);
  return bf16_value(pattern);
}

// What the rounding of a format may change of a momentum (update_accuracy_test.cpp says why).
double momentum_room(const TileMemory& tile, std::size_t i, double size) {
  const double scale = has_scales(tile.format) ? tile.momentum_scales[i / group_size] : 0.0f;
  switch (tile.format) {
    case StateFormat::bf16: return coarse_ulp(size) * 1.01;
    case StateFormat::compact: return (size + scale / 128) / 16 * 1.01;
    case StateFormat::four_bit: return (size + scale / 128) * 1.01;
    default: return 0.0;
  }
}

void check_elements(const UpdateShape& shape, const GroupStep& step) {
  UpdateMemory before(shape);
  UpdateMemory after(shape);
  cpu_backend({.threads = 1})->update(direction_tile(after), std::vector<Run>{{0, shape.count, 0}}, {&step, 1});
  const TileMemory old_tile = before.tile();  // it has a master, which state_of() reads too
  const TileMemory new_tile = after.tile();
  for (std::size_t i = 0; i < shape.count; ++i) {
    const auto gradient = static_cast<float>(gradient_of(old_tile, i) * double{step.gradient_factor});
    const ExactStep exact =
        exact_step(step.rule, {.momentum = state_of(old_tile, i, step.rule).momentum}, double{gradient});
    const double wrong_direction = std::abs(direction_at(new_tile, i) - exact.value.parameter);
    const double wrong_momentum = std::abs(state_of(new_tile, i, step.rule).momentum - exact.value.momentum);
    const bool good =
        wrong_direction <= coarse_ulp(std::abs(exact.value.parameter)) / 2 + 4 * ulp(exact.size.parameter) &&
        wrong_momentum <= 2 * ulp(exact.size.momentum) + momentum_room(new_tile, i, exact.size.momentum);
    if (!good) {
      CAPTURE(i, gradient, exact.value.parameter, wrong_direction, exact.value.momentum, wrong_momentum);
      FAIL("an element is wrong");
    }
  }
  // Nothing else was written.
  std::memcpy(old_tile.parameter, new_tile.parameter, 2 * shape.count);
  std::memcpy(old_tile.momentum, new_tile.momentum, moment_bytes(shape.format, shape.count));
  if (has_scales(shape.format)) {
    const std::size_t groups = (shape.count + group_size - 1) / group_size;
    std::memcpy(old_tile.momentum_scales, new_tile.momentum_scales, groups * sizeof(float));
  }
  CHECK((before.bytes() == after.bytes()));
}

template <class Check>
void each_shape(const Check& check) {
  for (const StateFormat format : all_state_formats) {
    for (const DType gradient : floating_dtypes) {
      check(UpdateShape{.format = format, .gradient_dtype = gradient});
    }
  }
}

std::vector<std::byte> made_on(TestBackend& on, const UpdateShape& shape, const std::vector<Run>& runs) {
  UpdateMemory memory(shape);
  const std::shared_ptr<std::byte> placed = on.allocate(memory.bytes().size());
  on.write(placed.get(), memory.bytes().data(), memory.bytes().size());
  const std::vector<GroupStep> steps{{with_nesterov, -0.37f}, {without, 1.0f}};
  on.kernels().update(direction_tile(memory, placed.get()), runs, steps);
  on.read(memory.bytes().data(), placed.get(), memory.bytes().size());
  return memory.bytes();
}

std::vector<std::byte> made_by_scalar_code(const UpdateShape& shape, const std::vector<Run>& runs) {
  UpdateMemory memory(shape);
  const std::vector<GroupStep> steps{{with_nesterov, -0.37f}, {without, 1.0f}};
  plain_backend().update(direction_tile(memory), runs, steps);
  return memory.bytes();
}

void check_bits(TestBackend& on) {
  each_shape([&](UpdateShape shape) {
    for (const std::size_t count : {1u, 127u, 128u, 700u, 2049u}) {
      shape.count = count;
      shape.shift = count % 3;
      const std::size_t first = count / 2 / group_size * group_size;
      const std::vector<Run> runs{{0, first, 0}, {first, count - first, 1}};
      if (made_on(on, shape, runs) != made_by_scalar_code(shape, runs)) {
        FAIL("other bits: " << name(shape.format) << ", gradient " << name(shape.gradient_dtype) << ", " << count);
      }
    }
  });
}

}  // namespace

TEST_CASE("directions of 0 to 1,100 elements agree with doubles") {
  std::size_t count = 0;
  while (count <= 1100) {
    each_shape([&](UpdateShape shape) {
      shape.count = count;
      shape.shift = count % 4;
      INFO(name(shape.format) << ", gradient " << name(shape.gradient_dtype) << ", " << count << " elements");
      check_elements(shape, {count % 2 == 0 ? with_nesterov : without, count % 3 == 0 ? 1.0f : -0.37f});
      count += testing::every(11);
    });
  }
}

TEST_CASE("directions have the same bits on every instruction set and any number of threads") {
  on_every_cpu(check_bits);
}
TEST_CASE("CUDA's threads make directions as the CPU does") { on_octets(check_bits); }
TEST_CASE("CUDA makes directions as the CPU does", "[gpu]") { on_cuda(check_bits); }

TEST_CASE("any cut into tiles gives the same directions") {
  const std::vector<GroupStep> steps{{with_nesterov, 0.5f}};
  each_shape([&](UpdateShape shape) {
    shape.count = 1000;
    UpdateMemory whole(shape);
    UpdateMemory cut(shape);
    plain_backend().update(direction_tile(whole), std::vector<Run>{{0, 1000, 0}}, steps);
    for (std::size_t begin = 0; begin < 1000; begin += 384) {
      const std::size_t count = std::min<std::size_t>(384, 1000 - begin);
      plain_backend().update(part(direction_tile(cut), begin, count), std::vector<Run>{{0, count, 0}}, steps);
    }
    CHECK((cut.bytes() == whole.bytes()));
  });
}

TEST_CASE("a direction without Nesterov's rule is the momentum, rounded") {
  UpdateMemory memory({.count = 300});
  const TileMemory tile = direction_tile(memory);
  plain_backend().update(tile, std::vector<Run>{{0, 300, 0}}, std::vector<GroupStep>{{without}});
  std::vector<std::uint16_t> rounded(300);
  plain_backend().cast({tile.momentum, 300, DType::fp32},
                       {reinterpret_cast<std::byte*>(rounded.data()), 300, DType::bf16});
  for (std::size_t i = 0; i < 300; ++i) {
    const bool is_flushed = rounded[i] == 0;  // no value of a direction is flushed
    CHECK((is_flushed || bf16_value(rounded[i]) == direction_at(tile, i)));
  }
}

TEST_CASE("a direction is refused where a master or another format is given") {
  UpdateMemory memory({.count = 128});
  const std::vector<Run> runs{{0, 128, 0}};
  const std::vector<GroupStep> steps{{with_nesterov}};
  const auto refused = [&](const TileMemory& tile) {
    CHECK_THROWS_WITH(plain_backend().update(tile, runs, steps), Catch::Contains("B1001"));
  };
  refused(memory.tile());
  TileMemory wide = direction_tile(memory);
  wide.parameter_dtype = DType::fp32;
  refused(wide);
  TileMemory without_momentum = direction_tile(memory);
  without_momentum.momentum = nullptr;
  refused(without_momentum);
}

}  // namespace ballast::kernels

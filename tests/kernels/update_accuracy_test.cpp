// Compares every element of an update with the same step in doubles, for every rule, format and size.
#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"
#include "tests/kernels/update_reference.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::kernels;
using ballast::DType;

namespace {

// Bounds on an update's rounding errors, in ULP of the sum of its terms' sizes.
constexpr double parameter_ulp = 3;
constexpr double momentum_ulp = 2.5;
constexpr double variance_ulp = 3;

Backend& cpu() {
  static const auto backend = cpu_backend({.threads = 1});
  return *backend;
}

// Returns the additional error of formats that round: less than one step of the stored values.
Element storage_step(const TileMemory& tile, std::size_t i, const Element& size) {
  switch (tile.format) {
    case StateFormat::bf16:
      return {.momentum = coarse_ulp(size.momentum) * 1.01, .variance = coarse_ulp(size.variance) * 1.01};
    case StateFormat::compact: {
      const double momentum_scale = tile.momentum_scales[i / 128];
      const double root_scale = tile.variance_scales[i / 128];
      const double root = std::sqrt(size.variance);
      // A step of a segment is 1/16 or 1/32 of the segment's beginning, counted from -1/128 of the scale.
      const double root_step = (root + root_scale / 128) / 32 * 1.01;
      return {.parameter = 256 * ulp(size.parameter),
              .momentum = (size.momentum + momentum_scale / 128) / 16 * 1.01,
              .variance = 2 * root * root_step + root_step * root_step};
    }
    case StateFormat::four_bit: {
      const double momentum_scale = tile.momentum_scales[i / 128];
      const double root = std::sqrt(size.variance);
      // A step of a momentum is its segment's beginning, counted from -1/128 of the scale; of a root it is half of its
      // power of two. Smaller roots become the smallest one.
      const double root_step = std::max(root / 2, double{tile.variance_scales[i / 128]} / 128) * 1.01;
      return {.parameter = 256 * ulp(size.parameter),
              .momentum = (size.momentum + momentum_scale / 128) * 1.01,
              .variance = 2 * root * root_step + root_step * root_step};
    }
    default: return {};
  }
}

bool close(double got, double expected, double bound) { return std::abs(got - expected) <= bound; }

void check_element(const TileMemory& before, const TileMemory& after, std::size_t i, const GroupStep& step) {
  const double gradient = gradient_of(before, i);
  const auto scaled = static_cast<float>(gradient * double{step.gradient_factor});
  const Element old = state_of(before, i, step.rule);
  const ExactStep exact = exact_step(step.rule, old, double{scaled});
  const Element got = state_of(after, i, step.rule);
  const Element room = storage_step(after, i, exact.size);
  const bool good =
      close(got.parameter, exact.value.parameter,
            parameter_ulp * ulp(exact.size.parameter) + exact.doubt + room.parameter) &&
      close(got.momentum, exact.value.momentum, momentum_ulp * ulp(exact.size.momentum) + room.momentum) &&
      close(got.variance, exact.value.variance, variance_ulp * ulp(exact.size.variance) + room.variance);
  if (!good) {
    CAPTURE(i, gradient, old.parameter, old.momentum, old.variance, exact.value.parameter, got.parameter,
            exact.value.momentum, got.momentum, exact.value.variance, got.variance);
    FAIL("an element is wrong");
  }
}

// Checks that the low-precision parameter is the master rounded to the nearest.
void check_parameter(const TileMemory& tile, std::size_t i, const Rule& rule) {
  if (tile.parameter_dtype == DType::fp32) return;
  std::uint16_t stored;
  std::memcpy(&stored, tile.parameter + 2 * i, 2);
  const double master = state_of(tile, i, rule).parameter;
  const bool bf16 = tile.parameter_dtype == DType::bf16;
  const double got = bf16 ? bf16_value(stored) : fp16_value(stored);
  const double step = bf16 ? coarse_ulp(std::abs(master)) : std::max(ulp(std::abs(master)) * 8192, 0x1p-24);
  if (!close(got, master, step / 2)) {
    CAPTURE(i, master, got);
    FAIL("a parameter is not its master, rounded");
  }
}

// Copies the arrays that a rule may write from `got` into `expected`. Any difference that remains was written in error.
void forgive_run(UpdateMemory& expected, UpdateMemory& got, const Run& run, const Rule& rule) {
  const TileMemory to = part(expected.tile(), run.begin, run.count);
  const TileMemory from = part(got.tile(), run.begin, run.count);
  const auto copy = [&](void* target, const void* source, std::size_t bytes) {
    if (target != nullptr && bytes > 0) std::memcpy(target, source, bytes);
  };
  const std::size_t groups = (run.count + group_size - 1) / group_size;
  copy(to.parameter, from.parameter, run.count * byte_size(to.parameter_dtype));
  copy(to.master, from.master, run.count * master_bytes(to.format));
  if (has_momentum(rule)) {
    copy(to.momentum, from.momentum, moment_bytes(to.format, run.count));
    copy(to.momentum_scales, from.momentum_scales, groups * sizeof(float));
  }
  if (has_variance(rule)) {
    copy(to.variance, from.variance, moment_bytes(to.format, run.count));
    copy(to.variance_scales, from.variance_scales, groups * sizeof(float));
  }
}

void check_update_of(const UpdateShape& shape, const std::vector<Run>& runs, const std::vector<GroupStep>& groups) {
  UpdateMemory before(shape);
  UpdateMemory after(shape);
  cpu().update(after.tile(), runs, groups);
  for (const Run& run : runs) {
    for (std::size_t i = run.begin; i < run.begin + run.count; ++i) {
      check_element(before.tile(), after.tile(), i, groups[run.group]);
      check_parameter(after.tile(), i, groups[run.group].rule);
    }
  }
  for (const Run& run : runs) {
    forgive_run(before, after, run, groups[run.group].rule);
  }
  if (before.bytes() != after.bytes()) {
    FAIL("written outside the run");
  }
}

void check_sizes(StateFormat format, const Rule& rule) {
  const std::vector<UpdateShape> shapes = sample_shapes(format);
  for (std::size_t count = 0; count <= 1100; count += testing::every(11)) {
    UpdateShape shape = shapes[count % shapes.size()];
    shape.count = count;
    shape.shift = count / shapes.size() % 4;
    INFO(name(format) << ", rule " << rule.index() << ", parameter " << name(shape.parameter_dtype) << ", gradient "
                      << name(shape.gradient_dtype) << ", " << count << " elements, shifted by " << shape.shift);
    check_update_of(shape, {{0, count, 0}}, {{.rule = rule, .gradient_factor = count % 2 == 0 ? 1.0f : -0.37f}});
  }
  SUCCEED();
}

}  // namespace

TEST_CASE("updates of 0 to 1,100 elements agree with doubles, fp32") {
  for (const Rule& rule : sample_rules())
    check_sizes(StateFormat::fp32, rule);
}
TEST_CASE("updates of 0 to 1,100 elements agree with doubles, split") {
  for (const Rule& rule : sample_rules())
    check_sizes(StateFormat::split, rule);
}
TEST_CASE("updates of 0 to 1,100 elements agree with doubles, bf16") {
  for (const Rule& rule : sample_rules())
    check_sizes(StateFormat::bf16, rule);
}
TEST_CASE("updates of 0 to 1,100 elements agree with doubles, compact") {
  for (const Rule& rule : sample_rules())
    check_sizes(StateFormat::compact, rule);
}

TEST_CASE("updates of 0 to 1,100 elements agree with doubles, 4bit") {
  for (const Rule& rule : sample_rules())
    check_sizes(StateFormat::four_bit, rule);
}

TEST_CASE("without decay a momentum is the gradient, however large it was before") {
  AdamW adamw = std::get<AdamW>(sample_rules().front());
  adamw.mean = RunningMean::of(0.0);
  const Lion lion{.lr = 1e-3f, .decay = 1.0f, .mean = RunningMean::of(0.9), .kept_mean = RunningMean::of(0.0)};
  for (const Rule& rule : {Rule(adamw), Rule(lion)}) {
    UpdateMemory memory({.format = StateFormat::fp32, .gradient_dtype = DType::fp32, .count = 100});
    const TileMemory tile = memory.tile();
    std::fill_n(reinterpret_cast<float*>(tile.momentum), 100, 1e9f);
    std::fill_n(reinterpret_cast<float*>(const_cast<std::byte*>(tile.gradient)), 100, 1e-3f);
    cpu().update(tile, std::vector<Run>{{0, 100, 0}}, std::vector<GroupStep>{{.rule = rule}});
    for (std::size_t i = 0; i < 100; ++i)
      CHECK(state_of(tile, i, rule).momentum == double{1e-3f});
  }
}

TEST_CASE("large updates agree with doubles") {
  testing::Sweep sweep(7);
  for (const StateFormat format : all_state_formats) {
    for (const std::size_t count : {65'536u, 300'001u}) {
      for (const Rule& rule : sample_rules()) {
        if (!sweep.takes_next()) continue;
        check_update_of({.format = format, .count = count}, {{0, count, 0}}, {{.rule = rule}});
      }
    }
  }
  SUCCEED();
}

TEST_CASE("each run of a tile takes its own group's step, and the gaps between runs stay as they are") {
  std::vector<GroupStep> groups;
  for (const Rule& rule : sample_rules()) {
    groups.push_back({.rule = rule, .gradient_factor = 0.5f + 0.25f * static_cast<float>(groups.size())});
  }
  for (const StateFormat format : all_state_formats) {
    const bool anywhere = format == StateFormat::fp32 || format == StateFormat::split;
    const std::size_t apart = anywhere ? 7 : 0;  // these formats let runs begin anywhere
    std::vector<Run> runs;
    std::size_t begin = apart;
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t count = i * 53 % 500;
      runs.push_back({begin, count, i % groups.size()});
      begin += (count + group_size - 1) / group_size * group_size + i % 3 * group_size + apart;
    }
    for (UpdateShape shape : sample_shapes(format)) {
      shape.count = begin;
      INFO(name(format));
      check_update_of(shape, runs, groups);
    }
  }
  SUCCEED();
}

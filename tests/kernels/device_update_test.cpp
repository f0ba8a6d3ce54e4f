// Tests that the optimizer step for GPUs gives the bits of the CPU walk.
#include "tests/kernels/device_backends.h"
#include "tests/kernels/update_memory.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

using Sizes = std::vector<std::size_t>;

// Says where the bits differ from those of the CPU; nothing if they are the same.
std::string difference(TestBackend& on, const UpdateShape& shape, const std::vector<Run>& runs,
                       const std::vector<GroupStep>& groups) {
  UpdateMemory expected(shape);
  UpdateMemory got(shape);
  cpu_backend({.threads = 1})->update(expected.tile(), runs, groups);
  const std::shared_ptr<std::byte> memory = on.allocate(got.bytes().size());
  on.write(memory.get(), got.bytes().data(), got.bytes().size());
  on.kernels().update(got.tile_at(memory.get()), runs, groups);
  on.read(got.bytes().data(), memory.get(), got.bytes().size());
  return got.difference(expected);
}

void check_shapes(TestBackend& on, const Sizes& counts) {
  for (const StateFormat format : all_state_formats) {
    for (UpdateShape shape : sample_shapes(format)) {
      for (const Rule& rule : sample_rules()) {
        for (const std::size_t count : counts) {
          shape.count = count;
          shape.shift = count % 3 == 0 ? 0 : count % 3 == 1 ? 1 : 8;
          const std::string found = difference(on, shape, {{0, count, 0}}, {{.rule = rule, .gradient_factor = -0.37f}});
          if (!found.empty()) {  // all that differ are said, because a run on a GPU is rare
            FAIL_CHECK(name(format) << ' ' << name(shape.parameter_dtype) << ' ' << name(shape.gradient_dtype)
                                    << " rule " << rule.index() << " count " << count << " shift " << shape.shift
                                    << ": " << found);
          }
        }
      }
    }
  }
}

void every_shape(TestBackend& on) {
  check_shapes(on, {0, 1, 7, 8, 9, 127, 128, 129, 255, 256, 300, 1000, 2047, 2048, 2049, 5000, 6000});
}

// An emulated GPU has few threads, and needs time for each element.
void large_shapes(TestBackend& on) {
  const std::size_t count = is_emulated() ? (testing::sanitized ? 20'002 : 100'002) : 1'000'002;
  check_shapes(on, {count, count + 1});
}

// More elements than a launch has threads.
void very_large(TestBackend& on) {
  for (const StateFormat format : all_state_formats) {
    const UpdateShape shape{.format = format, .count = (std::size_t{17} << (is_emulated() ? 14 : 20)) + 77};
    CHECK(difference(on, shape, {{0, shape.count, 0}}, {{.rule = sample_rules()[0]}}) == "");
  }
}

void every_size(TestBackend& on) {
  for (const StateFormat format : all_state_formats) {
    for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
      const UpdateShape shape{.format = format, .count = count, .first_index = (std::uint64_t{1} << 32) - 512};
      const std::string found = difference(on, shape, {{0, count, 0}}, {{.rule = sample_rules()[0]}});
      if (!found.empty()) FAIL_CHECK(name(format) << " count " << count << ": " << found);
    }
  }
}

// More runs than one launch takes, of several rules and factors. The key of the random bits changes inside.
void many_runs(TestBackend& on) {
  std::vector<GroupStep> groups;
  for (const Rule& rule : sample_rules()) {
    groups.push_back({.rule = rule, .gradient_factor = 0.5f + static_cast<float>(groups.size())});
  }
  std::vector<Run> runs;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < 1000; ++i) {
    const std::size_t count = i * 37 % 400;
    runs.push_back({begin, count, i % groups.size()});
    begin += (count + group_size - 1) / group_size * group_size + i % 3 * group_size;
  }
  for (const StateFormat format : all_state_formats) {
    const std::uint64_t index = (std::uint64_t{1} << 32) - 64 * group_size;
    CHECK(difference(on, {.format = format, .count = begin, .first_index = index}, runs, groups) == "");
  }
}

void runs_that_start_anywhere(TestBackend& on) {
  for (const StateFormat format : {StateFormat::fp32, StateFormat::split}) {
    const std::vector<Run> runs{{1, 3, 0}, {5, 700, 0}, {706, 1, 0}, {712, 256, 0}};
    CHECK(difference(on, {.format = format, .count = 1000}, runs, {{.rule = sample_rules()[0]}}) == "");
  }
}

// Checks that a NaN stays a NaN and that no other element becomes one. The bits of the NaN are not promised.
void nan_stays_nan(TestBackend& on) {
  UpdateMemory state({.parameter_dtype = DType::fp32, .gradient_dtype = DType::fp32, .count = 100});
  const float nan = std::nanf("");
  std::memcpy(state.bytes().data() + (state.tile().gradient - state.bytes().data()) + 40, &nan, 4);
  const std::shared_ptr<std::byte> memory = on.allocate(state.bytes().size());
  on.write(memory.get(), state.bytes().data(), state.bytes().size());
  on.kernels().update(state.tile_at(memory.get()), std::vector<Run>{{0, 100, 0}},
                      std::vector<GroupStep>{{.rule = sample_rules()[0]}});
  on.read(state.bytes().data(), memory.get(), state.bytes().size());
  const auto* parameter = reinterpret_cast<const float*>(state.tile().parameter);
  for (std::size_t i = 0; i < 100; ++i) {
    CHECK(std::isnan(parameter[i]) == (i == 10));
  }
}

}  // namespace

TEST_CASE("CUDA's threads update every format by every rule as the CPU does") { on_octets(every_shape); }
TEST_CASE("CUDA's threads update 0 to 1,100 elements as the CPU does") { on_octets(every_size); }
TEST_CASE("CUDA's threads update long lists of runs as the CPU does") { on_octets(many_runs); }
TEST_CASE("CUDA's threads update runs that start anywhere as the CPU does") { on_octets(runs_that_start_anywhere); }
TEST_CASE("a NaN stays NaN in an update by CUDA's threads") { on_octets(nan_stays_nan); }

TEST_CASE("CUDA updates every format by every rule as the CPU does", "[gpu]") { on_cuda(every_shape); }
TEST_CASE("CUDA updates many elements as the CPU does", "[gpu]") { on_cuda(large_shapes); }
TEST_CASE("CUDA updates more elements than it has threads as the CPU does", "[gpu]") { on_cuda(very_large); }
TEST_CASE("CUDA updates 0 to 1,100 elements as the CPU does", "[gpu]") { on_cuda(every_size); }
TEST_CASE("CUDA updates long lists of runs as the CPU does", "[gpu]") { on_cuda(many_runs); }
TEST_CASE("CUDA updates runs that start anywhere as the CPU does", "[gpu]") { on_cuda(runs_that_start_anywhere); }
TEST_CASE("a NaN stays NaN in a CUDA update", "[gpu]") { on_cuda(nan_stays_nan); }

TEST_CASE("requesting CUDA kernels that are missing fails with the reason") {
  if (device::list().empty()) {
    CHECK_THROWS_WITH(cuda_backend(nullptr), Catch::Contains("B2101") || Catch::Contains("B2102"));
  }
}

}  // namespace ballast::kernels

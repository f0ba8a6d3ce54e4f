// Tests that an update gives the same bits on each instruction set, on any number of threads and with any cut into
// tiles.
#include <catch2/catch.hpp>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::kernels;

namespace {

// Each rule on its own run. The number of elements fills neither the lanes nor a group.
struct Work {
  std::vector<Run> runs;
  std::vector<GroupStep> groups;
  std::size_t count = 0;
};

Work work_for_all_rules(std::size_t elements_of_a_run) {
  Work work;
  for (const Rule& rule : sample_rules()) {
    work.runs.push_back({work.count, elements_of_a_run, work.groups.size()});
    work.groups.push_back({.rule = rule, .gradient_factor = -0.37f});
    work.count += (elements_of_a_run + group_size - 1) / group_size * group_size;
  }
  return work;
}

std::vector<std::byte> updated(const CpuOptions& options, const UpdateShape& shape, const Work& work) {
  UpdateMemory memory(shape);
  const auto backend = cpu_backend(options);
  for (int step = 0; step < 2; ++step) {
    TileMemory tile = memory.tile();
    tile.rounding_stream += static_cast<std::uint64_t>(step);
    backend->update(tile, work.runs, work.groups);
  }
  return memory.bytes();
}

// This is not compared inside CHECK, which would print all bytes.
bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) { return a == b; }

template <class Check>
void for_each_shape(const Work& work, const Check& check) {
  for (const StateFormat format : all_state_formats) {
    for (UpdateShape shape : sample_shapes(format)) {
      shape.count = work.count;
      shape.first_index = std::uint64_t{77} << 20;
      INFO(name(format) << ", parameter " << name(shape.parameter_dtype) << ", gradient "
                        << name(shape.gradient_dtype));
      check(shape);
    }
  }
}

// Returns the part of a run list that lies in [begin, end), counted from begin.
std::vector<Run> runs_within(std::span<const Run> runs, std::size_t begin, std::size_t end) {
  std::vector<Run> within;
  for (const Run& run : runs) {
    const std::size_t first = std::max(run.begin, begin);
    const std::size_t last = std::min(run.begin + run.count, end);
    if (first < last) within.push_back({first - begin, last - first, run.group});
  }
  return within;
}

}  // namespace

TEST_CASE("every instruction set gives the bits of scalar code") {
  for_each_shape(work_for_all_rules(1000), [](UpdateShape shape) {
    const Work work = work_for_all_rules(1000);
    for (const std::size_t shift : {0u, 1u, 5u}) {
      shape.shift = shift;
      const auto expected = updated({.threads = 1, .isa = simd::Isa::scalar}, shape, work);
      for (const simd::Isa isa : simd::usable_isas()) {
        INFO(simd::name(isa));
        CHECK(same(updated({.threads = 1, .isa = isa}, shape, work), expected));
      }
    }
  });
}

TEST_CASE("any number of threads gives the same bits") {
  const Work work = work_for_all_rules(150'001);  // three pieces of work a run
  for (const StateFormat format : all_state_formats) {
    const UpdateShape shape{.format = format, .count = work.count};
    const auto expected = updated({.threads = 1}, shape, work);
    for (const int threads : {2, 3, 7}) {
      INFO(name(format) << ", " << threads << " threads");
      CHECK(same(updated({.threads = threads}, shape, work), expected));
    }
  }
}

TEST_CASE("any cut into tiles gives the same bits") {
  const Work work = work_for_all_rules(1000);
  const auto backend = cpu_backend({.threads = 1});
  for_each_shape(work, [&](const UpdateShape& shape) {
    UpdateMemory whole(shape);
    backend->update(whole.tile(), work.runs, work.groups);
    for (const std::size_t elements : {128u, 256u, 640u, 1920u}) {
      UpdateMemory cut(shape);
      for (std::size_t begin = 0; begin < work.count; begin += elements) {
        const std::size_t end = std::min(begin + elements, work.count);
        backend->update(part(cut.tile(), begin, end - begin), runs_within(work.runs, begin, end), work.groups);
      }
      INFO("tiles of " << elements);
      CHECK(same(cut.bytes(), whole.bytes()));
    }
  });
}

TEST_CASE("a tile's index among the others changes only its random bits") {
  const Work work = work_for_all_rules(1000);
  for (const StateFormat format : all_state_formats) {
    const bool rounds = format == StateFormat::bf16 || has_scales(format);
    const auto here = updated({.threads = 1}, {.format = format, .count = work.count}, work);
    const auto there = updated({.threads = 1}, {.format = format, .count = work.count, .first_index = 128}, work);
    const auto far = updated({.threads = 1}, {.format = format, .count = work.count, .first_index = 1ull << 32}, work);
    CHECK(same(here, there) == !rounds);
    CHECK(same(here, far) == !rounds);
  }
}

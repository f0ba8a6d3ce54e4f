// The CUDA optimizer step, thread by thread, on the CPU: what a thread computes and where it writes is the same source.
#include "kernels/update_octet.h"

#include <catch2/catch.hpp>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"

using namespace ballast::kernels;
using ballast::DType;

namespace {

using Sizes = std::vector<std::size_t>;

template <StateFormat format, class Rule>
void step_chunk(const UpdateTable<Rule>& table, std::size_t chunk) {
  std::vector<OctetStep> steps;
  std::vector<Largest> largest(threads_per_chunk / threads_per_group);
  for (unsigned thread = 0; thread < threads_per_chunk; ++thread) {
    steps.push_back(begin_step<format>(table, chunk, thread));
    Largest& of_group = largest[thread / threads_per_group];
    of_group.momentum = max(of_group.momentum, steps.back().largest.momentum);
    of_group.root = max(of_group.root, steps.back().largest.root);
  }
  for (unsigned thread = 0; thread < threads_per_chunk; ++thread) {
    end_step<format>(table, steps[thread], thread, largest[thread / threads_per_group]);
  }
}

void update_by_octets(const UpdateTile& tile, const std::vector<Run>& runs, const std::vector<GroupStep>& groups) {
  each_table(tile, runs, groups, [](const auto& table) {
    for (std::size_t chunk = 0; chunk < chunks(table.runs); ++chunk) {
      switch (table.tile.format) {
        case StateFormat::fp32: step_chunk<StateFormat::fp32>(table, chunk); break;
        case StateFormat::split: step_chunk<StateFormat::split>(table, chunk); break;
        case StateFormat::bf16: step_chunk<StateFormat::bf16>(table, chunk); break;
        case StateFormat::compact: step_chunk<StateFormat::compact>(table, chunk); break;
      }
    }
  });
}

bool same(const UpdateShape& shape, const std::vector<Run>& runs, const std::vector<GroupStep>& groups) {
  UpdateMemory expected(shape);
  UpdateMemory got(shape);
  cpu_backend({.threads = 1})->update(expected.tile(), runs, groups);
  update_by_octets(got.tile(), runs, groups);
  return got.bytes() == expected.bytes();
}

}  // namespace

TEST_CASE("eight elements a thread give the bits of the CPU walk, for every rule, format and size") {
  for (const StateFormat format : all_state_formats) {
    for (UpdateShape shape : sample_shapes(format)) {
      for (const Rule& rule : sample_rules()) {
        for (const std::size_t count :
             Sizes{0, 1, 7, 8, 9, 127, 128, 129, 255, 256, 300, 1000, 2047, 2048, 2049, 5000}) {
          shape.count = count;
          for (const std::size_t shift : Sizes{0, 1, 8}) {
            shape.shift = shift;
            INFO(name(format) << ' ' << name(shape.parameter_dtype) << ' ' << name(shape.gradient_dtype) << " rule "
                              << rule.index() << " count " << count << " shift " << shift);
            REQUIRE(same(shape, {{0, count, 0}}, {{.rule = rule, .gradient_factor = -0.37f}}));
          }
        }
      }
    }
  }
}

TEST_CASE("runs of several groups and rules give the bits of the CPU walk, far into a unit") {
  std::vector<GroupStep> groups;
  for (const Rule& rule : sample_rules()) {
    groups.push_back({.rule = rule, .gradient_factor = 0.5f + static_cast<float>(groups.size())});
  }
  std::vector<Run> runs;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < 200; ++i) {
    const std::size_t count = i * 37 % 400;
    runs.push_back({begin, count, i % groups.size()});
    begin += (count + group_size - 1) / group_size * group_size + i % 3 * group_size;
  }
  for (const StateFormat format : all_state_formats) {
    // The random bits' key changes inside.
    const UpdateShape shape{
        .format = format, .count = begin, .first_index = (std::uint64_t{1} << 32) - 64 * group_size};
    CHECK(same(shape, runs, groups));
  }
}

TEST_CASE("runs that start anywhere give the bits of the CPU walk") {
  for (const StateFormat format : {StateFormat::fp32, StateFormat::split}) {
    const std::vector<Run> runs{{1, 3, 0}, {5, 700, 0}, {706, 1, 0}, {712, 256, 0}};
    CHECK(same({.format = format, .count = 1000}, runs, {{.rule = sample_rules()[0]}}));
  }
}

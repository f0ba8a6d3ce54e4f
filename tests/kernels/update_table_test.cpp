// Tests which thread of a CUDA launch takes which element. They run on the CPU, with counts that no test could
// allocate.
#include "kernels/update_octet.h"

#include <catch2/catch.hpp>
#include <vector>

using namespace ballast;
using namespace ballast::kernels;

namespace {

using Table = UpdateTable<AdamW>;

const std::vector<GroupStep> one_group{{.rule = AdamW{}}};

Table table_of(const TileMemory& tile, const std::vector<Run>& runs) {
  Table found;
  each_table(tile, runs, one_group, [&](const auto& table) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(table)>, Table>) {
      found = table;
    }
  });
  return found;
}

// Returns how many threads take each element of the tile.
std::vector<int> taken(const Table& table, std::size_t count) {
  std::vector<int> times(count, 0);
  for (std::size_t chunk = 0; chunk < chunks(table.runs); ++chunk) {
    for (unsigned thread = 0; thread < threads_per_chunk; ++thread) {
      const OctetPlace place = place_of(table.runs, stretch_of(table.runs, chunk), chunk, thread);
      for (std::size_t i = 0; i < place.count; ++i) {
        ++times.at(place.first + i);
      }
    }
  }
  return times;
}

}  // namespace

TEST_CASE("each element of a run is covered once, and no other") {
  for (std::size_t count = 0; count <= 5000; count += 1 + count / 600) {
    const std::vector<Run> runs{{3, count / 3, 0}, {count / 3 + 5, 0, 0}, {count / 3 + 10, count - count / 3, 0}};
    const Table table = table_of({.count = count + 20}, runs);
    std::vector<int> expected(count + 20, 0);
    for (const Run& run : runs) {
      std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(run.begin), run.count, 1);
    }
    CHECK(taken(table, count + 20) == expected);
  }
}

TEST_CASE("chunks are found in lists of every length, and where counts need more than 32 bits") {
  const std::size_t large = (std::size_t{1} << 43) + 5;
  for (std::size_t count = 1; count <= runs_per_launch; ++count) {
    Stretches<runs_per_launch> runs;
    std::size_t begin = 1;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t length = i % 3 == 0 ? large : i % 3 == 1 ? 1 : 2049;
      add_stretch(runs, begin, length, true);
      begin += length + 128;
    }
    std::size_t first_chunk = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Stretch& run = runs.at[i];
      const std::size_t last_chunk = run.chunks_end - 1;
      CHECK(stretch_of(runs, first_chunk) == i);
      CHECK(stretch_of(runs, last_chunk) == i);
      CHECK(place_of(runs, i, first_chunk, 0).first == run.begin);
      const std::size_t in_last = (run.end - run.begin - 1) % chunk_size;
      const OctetPlace last = place_of(runs, i, last_chunk, static_cast<unsigned>(in_last / octet_size));
      CHECK(last.first + last.count == run.end);
      first_chunk = run.chunks_end;
    }
    CHECK(chunks(runs) == first_chunk);
  }
}

TEST_CASE("a launch takes 64 runs of one rule, in order") {
  AdamW adamw{};
  adamw.decay = 0.5f;
  Lion lion{};
  lion.lr = 3.0f;
  const std::vector<GroupStep> groups{{.rule = adamw, .gradient_factor = 2.0f}, {.rule = lion}};
  std::vector<Run> runs;
  for (std::size_t i = 0; i < 300; ++i) {
    runs.push_back({i * 128, i % 7, i % 3 == 2 ? 1u : 0u});
  }
  std::vector<std::size_t> begins[2];
  int launches = 0;
  each_table({.count = 300 * 128}, runs, groups, [&](const auto& table) {
    ++launches;
    for (std::size_t i = 0; i < table.runs.count; ++i) {
      constexpr bool is_lion = std::is_same_v<decltype(table.steps[0].rule), Lion>;
      begins[is_lion].push_back(table.runs.at[i].begin);
      if constexpr (is_lion) {
        CHECK(table.steps[i].rule.lr == 3.0f);
        CHECK(table.steps[i].gradient_factor == 1.0f);
      } else if constexpr (std::is_same_v<decltype(table.steps[0].rule), AdamW>) {
        CHECK(table.steps[i].rule.decay == 0.5f);
        CHECK(table.steps[i].gradient_factor == 2.0f);
      }
    }
  });
  std::vector<std::size_t> expected[2];
  for (const Run& run : runs) {
    if (run.count > 0) {
      expected[run.group].push_back(run.begin);
    }
  }
  CHECK(begins[0] == expected[0]);
  CHECK(begins[1] == expected[1]);
  CHECK(launches == 3 + 2);
}

TEST_CASE("whole octets are used only for runs whose arrays are all aligned") {
  alignas(16) std::byte memory[64];
  TileMemory tile{.format = StateFormat::compact, .count = 1000};
  for (std::byte* const array : {memory, memory + 8}) {  // bytes need 8, all else 16
    tile.master = tile.momentum = tile.variance = array;
    tile.parameter = memory;
    tile.gradient = memory;
    CHECK(aligned_at(tile, 0));
    CHECK(aligned_at(tile, 8));
    CHECK_FALSE(aligned_at(tile, 4));
  }
  tile.gradient = memory + 8;
  CHECK_FALSE(aligned_at(tile, 0));
  tile.gradient = memory;
  tile.momentum = memory + 4;
  CHECK_FALSE(aligned_at(tile, 0));
  tile.format = StateFormat::four_bit;  // eight elements are four bytes
  CHECK(aligned_at(tile, 0));
  CHECK(aligned_at(tile, 128));
  tile.momentum = memory + 2;
  CHECK_FALSE(aligned_at(tile, 0));
  const Table table = table_of({.count = 100}, {{0, 100, 0}});
  CHECK(table.runs.at[0].aligned);
  CHECK(place_of(table.runs, 0, 0, 11).whole);
  CHECK_FALSE(place_of(table.runs, 0, 0, 12).whole);
  CHECK(place_of(table.runs, 0, 0, 12).count == 4);
  CHECK(place_of(table.runs, 0, 0, 13).count == 0);
}

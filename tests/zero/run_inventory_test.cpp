// Tests which records of a run count, wherever they are.
#include "zero/runs/inventory.h"

#include <catch2/catch.hpp>
#include <thread>

using namespace ballast;
using Catch::Contains;

namespace {

struct Commit {
  std::uint64_t incarnation = 1;
  std::uint64_t number = 1;
  std::uint64_t step = 1;
};

// The records of a rank of a run of `ranks`.
SeenRecords seen(std::size_t seen_by, std::size_t rank, std::size_t ranks, std::uint64_t made_in,
                 const std::vector<Commit>& commits) {
  SeenRecords records{.seen_by = seen_by,
                      .site = seen_by,
                      .files = {rank, made_in},
                      .run_id = 7,
                      .digest = 100 + ranks,
                      .is_described = true,
                      .placement = {.shards = ranks}};
  for (const Commit& each : commits)
    records.commits.push_back({{each.incarnation, each.number}, each.step});
  return records;
}

}  // namespace

TEST_CASE("what a rank sees is told to others as it is") {
  std::vector<SeenRecords> all{seen(1, 0, 2, 0, {{1, 5, 4}, {1, 4, 3}}), seen(1, 1, 2, 9, {})};
  all[1].lacks_records = true;
  all[0].has_newest = true;
  all[1].placement.parameter_replicas = 2;
  all[0].is_described = false;
  all[0].commits[0].label = {7, 8, 9};
  all[1].site = 0;
  const auto ranks = thread_ranks(2);
  std::thread other([&] { seen_by_all(*ranks[1], all); });
  const auto read = seen_by_all(*ranks[0], {});
  other.join();
  REQUIRE(read.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(read[i].seen_by == 1);
    CHECK(read[i].site == all[i].site);
    CHECK(read[i].files == all[i].files);
    CHECK(read[i].run_id == 7);
    CHECK(read[i].digest == 102);
    CHECK(read[i].is_described == (i == 1));
    CHECK(read[i].is_of_model == all[i].is_of_model);
    CHECK(read[i].lacks_records == (i == 1));
    CHECK(read[i].has_newest == (i == 0));
    CHECK(read[i].placement == all[i].placement);
  }
  REQUIRE(read[0].commits.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(read[0].commits[i].point == all[0].commits[i].point);
    CHECK(read[0].commits[i].step == all[0].commits[i].step);
    CHECK(read[0].commits[i].label == all[0].commits[i].label);
  }
  CHECK(read[1].commits.empty());
}

TEST_CASE("the newest step that all ranks of a run have counts") {
  const std::vector<SeenRecords> all{seen(0, 0, 2, 0, {{1, 6, 5}, {1, 5, 4}}),
                                     seen(0, 1, 2, 0, {{1, 5, 4}, {1, 4, 3}})};
  const auto run = newest_whole_run(all, Goal("mine"));
  REQUIRE(run.has_value());
  CHECK(run->step == 4);
  CHECK(run->placement.ranks() == 2);
  CHECK(next_incarnation(all) == 2);
}

TEST_CASE("new records count when all of their ranks have committed them, even at the same step") {
  std::vector<SeenRecords> all{seen(0, 0, 2, 0, {{1, 6, 5}}), seen(0, 1, 2, 0, {{1, 6, 5}}),
                               seen(0, 0, 3, 2, {{2, 7, 5}}), seen(0, 1, 3, 2, {{2, 7, 5}}), seen(0, 2, 3, 2, {})};
  CHECK(newest_whole_run(all, Goal("mine"))->placement.ranks() == 2);
  CHECK(next_incarnation(all) == 3);
  all[4].commits.push_back({{2, 7}, 5});
  CHECK(newest_whole_run(all, Goal("mine"))->placement.ranks() == 3);
  all.erase(all.begin());  // the old ones are partly removed
  CHECK(newest_whole_run(all, Goal("mine"))->made_in == 2);
}

TEST_CASE("ranks of a site read the records that they see, else those of the lowest rank that sees some") {
  const std::vector<SeenRecords> all{seen(0, 0, 2, 0, {{}}), seen(1, 0, 2, 0, {{}}), seen(1, 1, 2, 0, {{}}),
                                     seen(2, 1, 2, 0, {{}})};
  const auto run = newest_whole_run(all, Goal("mine"));
  REQUIRE(run.has_value());
  const auto source = [&](std::size_t shard, std::size_t site) { return run->nearest(shard, site).seen_by; };
  CHECK(source(0, 0) == 0);
  CHECK(source(0, 1) == 1);
  CHECK(source(0, 2) == 0);
  CHECK(source(1, 0) == 1);
  CHECK(source(1, 2) == 2);
}

TEST_CASE("one copy of each shard is enough") {
  std::vector<SeenRecords> all{seen(0, 1, 2, 0, {{1, 6, 5}})};
  CHECK_THROWS_WITH(newest_whole_run(all, Goal("mine")),
                    Contains("B1009") && Contains("no rank finds the records of rank 0"));
  CHECK_THROWS_WITH(
      newest_whole_run(all, Goal("mine"), {12, "/saved here"}),
      Contains("else load the run's newest checkpoint, /saved here of step 12, in a run of another name"));
  all[0].placement = {.shards = 1, .replicas = 2};
  CHECK(newest_whole_run(all, Goal("mine"))->step == 5);
}

TEST_CASE("a run that has made no step begins again, unless its records are damaged") {
  std::vector<SeenRecords> all{seen(0, 0, 2, 0, {{1, 1, 0}})};
  CHECK_FALSE(newest_whole_run(all, Goal("mine")).has_value());
  CHECK_FALSE(newest_whole_run({}, Goal("mine")).has_value());
  all[0].commits.clear();
  all[0].lacks_records = true;
  all.push_back(seen(0, 1, 2, 0, {}));
  CHECK_THROWS_WITH(newest_whole_run(all, Goal("mine")),
                    Contains("B3202") && Contains("rank 0 has no commit, and records that"));
}

TEST_CASE("records whose description is missing are not adopted") {
  std::vector<SeenRecords> all{seen(0, 0, 1, 0, {{}})};
  all[0].is_described = false;
  CHECK_THROWS_WITH(newest_whole_run(all, Goal("mine")),
                    Contains("another training began it") && Contains("state.description is missing or damaged"));
}

TEST_CASE("records of two runs are told apart") {
  std::vector<SeenRecords> all{seen(0, 0, 2, 0, {{}}), seen(1, 1, 2, 0, {{}})};
  CHECK_NOTHROW(require_one_run(all, Goal("mine")));
  all[1].run_id = 8;
  CHECK_THROWS_WITH(require_one_run(all, Goal("mine")), Contains("rank 1 has run 0x8"));
}

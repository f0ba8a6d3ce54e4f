// Tests which commit ranks resume from, wherever they were stopped, once or several times.
#include <ballast/error.h>

#include "zero/runs/inventory.h"

#include <catch2/catch.hpp>
#include <random>
#include <set>

using namespace ballast;
using Catch::Contains;
using offload::CommitPoint;

namespace {

using History = std::vector<std::size_t>;  // the start that made each commit; it stands for a rank's state

// A rank's two slots. A generation is lost as soon as the next one but one is begun.
struct Rank {
  struct Slot {
    CommitPoint point{};
    History history{};
    auto operator<=>(const Slot&) const = default;
  };
  bool has_files = false;
  std::vector<Slot> slots{};  // the one that is resumed from, or was committed last, is the last
  auto operator<=>(const Rank&) const = default;
};
using Drives = std::vector<Rank>;  // one entry for each rank

std::vector<SeenRecords> seen_of(const Drives& drives) {
  std::vector<SeenRecords> ranks;
  for (std::size_t rank = 0; rank < drives.size(); ++rank) {
    SeenRecords& seen = ranks.emplace_back(SeenRecords{.seen_by = rank, .files = {.rank = rank}});
    if (drives[rank].has_files) seen.run_id = 7;
    const std::vector<Rank::Slot>& slots = drives[rank].slots;
    for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot)
      seen.commits.push_back({slot->point, slot->history.size() - 1});  // the first commit is step 0
  }
  return ranks;
}

// A start of the job: it resumes from the drives, and then moves one rank at a time, until it is stopped.
class Start {
 public:
  Start(Drives drives, std::size_t number) : drives_(std::move(drives)), number_(number), moves_(drives_.size()) {
    const auto seen = seen_of(drives_);
    const auto common = newest_common(seen, last_of_all);
    point_ = {next_incarnation(seen), common ? common->number : 0};
    for (Rank& rank : drives_) {
      resume(rank, common);
    }
    for (const Rank& rank : drives_) {
      is_one_history_ &= !common || rank.slots.back().history == drives_[0].slots.back().history;
    }
    if (common) history_ = drives_[0].slots.back().history;
  }

  bool is_one_history() const { return is_one_history_; }
  std::size_t resumed_commits() const { return resumed_; }
  const Drives& drives() const { return drives_; }

  // A commit is two moves: its tiles overwrite the older generation, and then it exists. All ranks have committed the
  // last one before any rank overwrites the generation before that.
  bool can_move(std::size_t rank, std::size_t commits) const {
    const bool begins = moves_[rank] % 2 == 0;
    const auto others_are_there = [&](std::size_t moves) { return moves >= moves_[rank]; };
    return moves_[rank] < 2 * commits && (!begins || std::ranges::all_of(moves_, others_are_there));
  }

  void move(std::size_t rank) {
    std::vector<Rank::Slot>& slots = drives_[rank].slots;
    drives_[rank].has_files = true;
    const std::size_t commit = moves_[rank]++ / 2 + 1;
    if (moves_[rank] % 2 == 1) {
      if (slots.size() == 2) slots.erase(slots.begin());
      return;
    }
    History history = history_;
    history.insert(history.end(), commit, number_);
    slots.push_back({{point_.incarnation, point_.number + commit}, history});
  }

  const std::vector<std::size_t>& moves() const { return moves_; }

 private:
  // Puts the commit from which the rank resumes last, so that the next commit overwrites the one that was passed over.
  void resume(Rank& rank, std::optional<CommitPoint> common) {
    if (!common) return;
    const auto found = std::ranges::find(rank.slots, *common, &Rank::Slot::point);
    std::rotate(found, found + 1, rank.slots.end());
    resumed_ = rank.slots.back().history.size();
  }

  Drives drives_;
  std::size_t number_;
  CommitPoint point_{};
  History history_{};
  std::vector<std::size_t> moves_;  // the moves of each rank
  std::size_t resumed_ = 0;
  bool is_one_history_ = true;
};

// Collects every state in which the drives can be when this start is stopped, at any moment.
void stop_anywhere(const Start& start, std::size_t commits, std::set<std::vector<std::size_t>>& seen,
                   std::set<Drives>& stopped) {
  if (!seen.insert(start.moves()).second) return;
  stopped.insert(start.drives());
  for (std::size_t rank = 0; rank < start.drives().size(); ++rank) {
    if (!start.can_move(rank, commits)) continue;
    Start further = start;
    further.move(rank);
    stop_anywhere(further, commits, seen, stopped);
  }
}

// Returns whether no commit is lost that all ranks had.
bool resumes_well(const Drives& drives, const Start& start) {
  std::size_t least = SIZE_MAX;
  for (const Rank& rank : drives)
    least = std::min(least, rank.slots.empty() ? 0 : rank.slots.back().history.size());
  return start.is_one_history() && start.resumed_commits() + 1 >= least;
}

}  // namespace

TEST_CASE("ranks resume one history and lose at most one commit, wherever several starts were stopped") {
  for (const auto& [ranks, starts, commits] :
       {std::tuple{2u, 5u, 2u}, std::tuple{3u, 4u, 2u}, std::tuple{2u, 4u, 3u}}) {
    CAPTURE(ranks, starts, commits);
    std::set<Drives> drives{Drives(ranks)};
    std::size_t bad = 0;
    for (std::size_t number = 0; number < starts; ++number) {
      std::set<Drives> stopped;
      for (const Drives& each : drives) {
        const Start start(each, number);
        if (!resumes_well(each, start)) ++bad;
        std::set<std::vector<std::size_t>> seen;
        stop_anywhere(start, commits, seen, stopped);
      }
      drives = std::move(stopped);
    }
    CHECK(bad == 0);
    CHECK(drives.size() > 100);
  }
}

TEST_CASE("ranks resume one history and lose at most one commit after 2,000 starts stopped at random") {
  std::mt19937 random(3);
  Drives drives(3);
  std::size_t most = 0;
  for (std::size_t number = 0; number < 2000; ++number) {
    Start start(drives, number);
    REQUIRE(resumes_well(drives, start));
    most = std::max(most, start.resumed_commits());
    for (std::size_t moves = random() % 20; moves > 0; --moves) {
      const std::size_t rank = random() % drives.size();
      if (start.can_move(rank, 100)) start.move(rank);
    }
    drives = start.drives();
  }
  CHECK(most > 1000);
}

TEST_CASE("ranks resume from the newest common commit, in a new incarnation") {
  const std::vector<SeenRecords> ranks{{.run_id = 7, .commits = {{{1, 6}, 6}, {{1, 5}, 5}}},
                                       {.run_id = 7, .commits = {{{2, 6}, 6}, {{1, 5}, 5}}}};
  CHECK(newest_common(ranks, last_of_all) == CommitPoint{1, 5});
  CHECK(next_incarnation(ranks) == 3);
  CHECK(known_run_id(ranks) == 7);
}

// The records of ranks that have trained together.
std::vector<SeenRecords> ranks_together(std::size_t ranks, const std::vector<offload::FoundRecords::Found>& commits) {
  std::vector<SeenRecords> all(ranks,
                               {.run_id = 7, .is_described = true, .placement = {.shards = ranks}, .commits = commits});
  for (std::size_t rank = 0; rank < ranks; ++rank)
    all[rank].files.rank = rank;
  return all;
}

TEST_CASE("commits of the same number and different steps are not common") {
  std::vector<SeenRecords> ranks = ranks_together(2, {{{1, 6}, 6}});
  ranks[1].commits = {{{1, 6}, 5}};
  CHECK_FALSE(newest_common(ranks, last_of_all).has_value());
  CHECK_THROWS_WITH(newest_whole_run(ranks, Goal("mine")),
                    Contains("B1009") && Contains("rank 0 has step 6 (commit 6 of incarnation 1)") &&
                        Contains("rank 1 has step 5 (commit 6 of incarnation 1)"));
}

TEST_CASE("a run in which no rank has made a step begins anew, in the existing files") {
  const std::vector<SeenRecords> ranks{{.run_id = 7, .commits = {{{1, 1}, 0}}}, {}};
  CHECK_FALSE(newest_common(ranks, last_of_all).has_value());
  CHECK_FALSE(have_begun(ranks, last_of_all));
  CHECK(known_run_id(ranks) == 7);
  CHECK(next_incarnation(ranks) == 2);
  CHECK(known_run_id(std::vector<SeenRecords>(2)) == 0);
}

TEST_CASE("damage is not reported as another run, and a long list of ranks is shortened") {
  std::vector<SeenRecords> ranks = ranks_together(40, {{{1, 6}, 6}});
  ranks[3].commits = {};
  CHECK_THROWS_WITH(newest_whole_run(ranks, Goal("mine")),
                    Contains("B1009") && Contains("rank 3 has no commit;") && Contains("and 24 more"));
  ranks[3].commits = {{{1, 6}, 6}};
  ranks[3].drop({1, 6});
  CHECK_THROWS_WITH(newest_whole_run(ranks, Goal("mine")),
                    Contains("B3202") && Contains("rank 3 has no commit, and records that are damaged"));
}

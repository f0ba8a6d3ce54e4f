#include "zero/runs/history.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>

namespace ballast {
namespace {

constexpr std::size_t ranks_listed = 16;

using Commit = offload::FoundRecords::Found;

// The steps must agree too: commits of one name and different steps hold different states.
bool has(const RankHistory& rank, const Commit& wanted) {
  return std::ranges::any_of(
      rank.commits, [&](const Commit& commit) { return commit.point == wanted.point && commit.step == wanted.step; });
}

std::string text_of(std::size_t number, const RankHistory& rank) {
  std::vector<std::string> commits;
  for (const auto& [point, step, label] : rank.commits) {
    commits.push_back(fmt::format("step {} (commit {} of incarnation {})", step, point.number, point.incarnation));
  }
  return fmt::format("rank {} has {}{}", number,
                     commits.empty() ? "no commit" : fmt::format("{}", fmt::join(commits, " and ")),
                     rank.lacks_records ? ", and one whose records are damaged" : "");
}

std::string text_of(std::span<const RankHistory> ranks) {
  std::vector<std::string> lines;
  for (std::size_t rank = 0; rank < std::min(ranks.size(), ranks_listed); ++rank) {
    lines.push_back(text_of(rank, ranks[rank]));
  }
  if (ranks.size() > ranks_listed) lines.push_back(fmt::format("and {} more ranks", ranks.size() - ranks_listed));
  return fmt::format("{}", fmt::join(lines, "; "));
}

std::optional<offload::CommitPoint> newest_common(std::span<const RankHistory> ranks, offload::CommitPoint last) {
  for (const auto& commit : ranks.front().commits) {
    if (commit.point <= last && std::ranges::all_of(ranks, [&](const RankHistory& rank) { return has(rank, commit); }))
      return commit.point;
  }
  return {};
}

bool have_begun(std::span<const RankHistory> ranks, offload::CommitPoint last) {
  return std::ranges::any_of(ranks, [&](const RankHistory& rank) {
    return std::ranges::any_of(rank.commits,
                               [&](const auto& commit) { return commit.point <= last && commit.step > 0; });
  });
}

}  // namespace

void RankHistory::drop(offload::CommitPoint point) {
  std::erase_if(commits, [&](const auto& commit) { return commit.point == point; });
  lacks_records = true;
}

// Files that were created but never filled hold a commit of incarnation 0.
RankHistory history_of(const std::optional<offload::FoundRecords>& found) {
  if (!found) return {};
  RankHistory history{.has_files = true, .run_id = found->shape.run_id, .commits = found->commits};
  std::erase_if(history.commits, [](const auto& commit) { return commit.point.incarnation == 0; });
  return history;
}

std::vector<RankHistory> histories_of_all(Communicator& world, const RankHistory& mine) {
  constexpr std::size_t most_commits = 2;
  constexpr std::size_t words = 4 + 3 * most_commits;
  std::vector<std::int64_t> words_of_ranks(words * world.size());
  auto word = words_of_ranks.begin() + static_cast<std::ptrdiff_t>(words * world.rank());
  *word++ = mine.has_files ? 1 : 0;
  *word++ = std::bit_cast<std::int64_t>(mine.run_id);
  *word++ = mine.lacks_records ? 1 : 0;
  *word++ = static_cast<std::int64_t>(mine.commits.size());
  for (const auto& [point, step, label] : mine.commits) {
    for (const std::uint64_t each : {point.incarnation, point.number, step})
      *word++ = static_cast<std::int64_t>(each);
  }
  world.all_reduce(words_of_ranks);
  std::vector<RankHistory> ranks;
  const auto number = [&](std::size_t at) { return static_cast<std::uint64_t>(words_of_ranks[at]); };
  for (std::size_t at = 0; at < words_of_ranks.size(); at += words) {
    RankHistory& rank = ranks.emplace_back(RankHistory{
        .has_files = words_of_ranks[at] != 0, .run_id = number(at + 1), .lacks_records = words_of_ranks[at + 2] != 0});
    for (std::size_t commit = 0; commit < std::min<std::uint64_t>(number(at + 3), most_commits); ++commit) {
      const std::size_t begin = at + 4 + 3 * commit;
      rank.commits.push_back({.point = {number(begin), number(begin + 1)}, .step = number(begin + 2)});
    }
  }
  return ranks;
}

std::optional<std::uint64_t> run_id_of(std::span<const RankHistory> ranks, const std::string& run) {
  const auto first = std::ranges::find_if(ranks, &RankHistory::has_files);
  if (first == ranks.end()) return {};
  const auto other = std::ranges::find_if(
      first, ranks.end(), [&](const RankHistory& rank) { return rank.has_files && rank.run_id != first->run_id; });
  require(other == ranks.end(), Code::run_mismatch, [&] {
    return Problem{
        .what = fmt::format("cannot resume run \"{}\": its directories belong to different runs", run),
        .where = fmt::format("rank {} has run {:#x}, rank {} has run {:#x}", first - ranks.begin(), first->run_id,
                             other - ranks.begin(), other->run_id),
        .remedy = "Give every rank its own directories of one run, or give the run another name. Nothing was changed."};
  });
  return first->run_id;
}

std::uint64_t next_incarnation(std::span<const RankHistory> ranks) {
  std::uint64_t newest = 0;
  for (const RankHistory& rank : ranks) {
    for (const auto& commit : rank.commits)
      newest = std::max(newest, commit.point.incarnation);
  }
  return newest + 1;
}

std::optional<offload::CommitPoint> common_point(std::span<const RankHistory> ranks, const std::string& run,
                                                 offload::CommitPoint last) {
  if (const auto newest = newest_common(ranks, last)) return newest;
  const bool is_damaged = std::ranges::any_of(ranks, &RankHistory::lacks_records);
  require(!have_begun(ranks, last), is_damaged ? Code::bad_record : Code::run_mismatch, [&] {
    return Problem{
        .what = fmt::format("cannot resume run \"{}\": its ranks have no commit in common", run),
        .available = text_of(ranks),
        .remedy =
            "Give every rank its own directories of one moment, load a checkpoint in a run of another name, or "
            "begin such a run. Nothing was changed."};
  });
  return {};
}

bool are_apart(std::span<const RankHistory> ranks, offload::CommitPoint last) {
  return !newest_common(ranks, last) && have_begun(ranks, last);
}

}  // namespace ballast

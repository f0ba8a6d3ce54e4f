#include "zero/runs/history.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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
  for (const auto& commit : ranks.front().commits) {
    if (commit.point <= last && std::ranges::all_of(ranks, [&](const RankHistory& rank) { return has(rank, commit); }))
      return commit.point;
  }
  const bool has_begun = std::ranges::any_of(ranks, [&](const RankHistory& rank) {
    return std::ranges::any_of(rank.commits,
                               [&](const auto& commit) { return commit.point <= last && commit.step > 0; });
  });
  const bool is_damaged = std::ranges::any_of(ranks, &RankHistory::lacks_records);
  require(!has_begun, is_damaged ? Code::bad_record : Code::run_mismatch, [&] {
    return Problem{
        .what = fmt::format("cannot resume run \"{}\": its ranks have no commit in common", run),
        .available = text_of(ranks),
        .remedy =
            "Give every rank its own directories of one moment, load a checkpoint in a run of another name, or "
            "begin such a run. Nothing was changed."};
  });
  return {};
}

}  // namespace ballast

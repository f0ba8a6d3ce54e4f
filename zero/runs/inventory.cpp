#include "zero/runs/inventory.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "zero/comm/on_all_ranks.h"
#include "zero/plan/layout.h"

namespace ballast {
namespace {

constexpr std::size_t most_ranks_listed = 16;

using Commit = offload::FoundRecords::Found;
using Commits = std::vector<Commit>;
using Seen = std::span<const SeenRecords>;
using Group = std::pair<std::uint64_t, std::uint64_t>;  // ranks that trained together: made_in and digest

// The steps must agree too: commits of one name and different steps hold different states.
bool has(const Commits& commits, const Commit& wanted) {
  return std::ranges::any_of(
      commits, [&](const Commit& commit) { return commit.point == wanted.point && commit.step == wanted.step; });
}

// Files that were created but never filled hold a commit of incarnation 0.
Commits filled(Commits commits) {
  std::erase_if(commits, [](const Commit& commit) { return commit.point.incarnation == 0; });
  return commits;
}

std::string text_of(const Commits& commits) {
  std::vector<std::string> texts;
  for (const auto& [point, step, label] : commits)
    texts.push_back(fmt::format("step {} (commit {} of incarnation {})", step, point.number, point.incarnation));
  return texts.empty() ? "no commit" : fmt::format("{}", fmt::join(texts, " and "));
}

Group group_of(const SeenRecords& records) { return {records.files.made_in, records.digest}; }

std::vector<SeenRecords> members_of(Seen seen, const Group& group) {
  std::vector<SeenRecords> members;
  std::ranges::copy_if(seen, std::back_inserter(members),
                       [&](const SeenRecords& each) { return group_of(each) == group; });
  return members;
}

// Returns the newest first.
Commits commits_of(Seen members, offload::CommitPoint last) {
  std::map<offload::CommitPoint, Commit, std::greater<>> by_point;
  for (const SeenRecords& records : members) {
    for (const Commit& commit : records.commits)
      if (commit.point <= last) by_point.emplace(commit.point, commit);
  }
  Commits commits;
  commits.reserve(by_point.size());
  for (const auto& [point, commit] : by_point)
    commits.push_back(commit);
  return commits;
}

std::vector<std::vector<WholeRun::Copy>> copies_at(const Commit& commit, Seen members) {
  const Placement& placement = members.front().placement;
  std::vector<std::vector<WholeRun::Copy>> copies(placement.shards);
  for (const SeenRecords& records : members) {
    if (records.files.rank < records.placement.ranks() && has(records.commits, commit)) {
      const RecordFiles& files = records.files;
      copies[shard_of(placement, files.rank)].push_back({files.rank, records.seen_by, records.site, files.is_mirror});
    }
  }
  for (auto& shard_copies : copies)
    std::ranges::sort(shard_copies, {},
                      [](const WholeRun::Copy& copy) { return std::tuple(copy.is_mirror, copy.rank, copy.seen_by); });
  return copies;
}

std::optional<WholeRun> newest_of(Seen members, offload::CommitPoint last) {
  if (members.empty() || !members.front().is_described) return {};
  for (const Commit& commit : commits_of(members, last)) {
    auto copies = copies_at(commit, members);
    if (std::ranges::any_of(copies, [](const auto& shard_copies) { return shard_copies.empty(); })) continue;
    const auto [made_in, digest] = group_of(members.front());
    return WholeRun{.made_in = made_in,
                    .digest = digest,
                    .placement = members.front().placement,
                    .point = commit.point,
                    .step = commit.step,
                    .label = commit.label,
                    .copies = std::move(copies)};
  }
  return {};
}

std::string joined(std::vector<std::string> lines) {
  if (lines.size() > most_ranks_listed) {
    const std::size_t more = lines.size() - most_ranks_listed;
    lines.resize(most_ranks_listed);
    lines.push_back(fmt::format("and {} more", more));
  }
  return fmt::format("{}", fmt::join(lines, "; "));
}

std::string text_of(const SeenRecords& records) {
  return fmt::format("{}rank {} has {}{}", records.files.is_mirror ? "the mirror of " : "", records.files.rank,
                     text_of(records.commits), records.lacks_records ? ", and records that are damaged" : "");
}

std::vector<std::string> ranks_without(Seen members) {
  std::set<std::size_t> seen;
  for (const SeenRecords& records : members)
    seen.insert(records.files.rank);
  std::vector<std::string> missing;
  for (std::size_t rank = 0; rank < members.front().placement.ranks(); ++rank) {
    if (!seen.contains(rank)) missing.push_back(std::to_string(rank));
  }
  return missing;
}

std::string texts_of(Seen members) {
  std::vector<std::string> texts;
  for (const SeenRecords& records : members) {
    std::string text = text_of(records);
    const bool is_new = std::ranges::find(texts, text) == texts.end();  // ranks that share a drive see the same
    if (is_new) texts.push_back(std::move(text));
  }
  return joined(std::move(texts));
}

[[noreturn]] void fail_without_common(Seen members, const Goal& goal, const std::string& load) {
  const bool is_damaged = std::ranges::any_of(members, &SeenRecords::lacks_records);
  fail(is_damaged ? Code::bad_record : Code::run_mismatch,
       {.what = fmt::format("cannot {}: its ranks have no commit in common", goal.what),
        .available = texts_of(members),
        .remedy = goal.remedy(fmt::format("Give every rank its own directories of one moment, {} in a run of another "
                                          "name, or begin such a run. Nothing was changed.",
                                          load))});
}

// `members` are those with the newest commit.
[[noreturn]] void fail_without_whole_run(Seen members, const Goal& goal, const KnownCheckpoint& checkpoint) {
  const std::string load = checkpoint.path.empty() ? "load a checkpoint"
                                                   : fmt::format("load the run's newest checkpoint, {} of step {},",
                                                                 checkpoint.path, checkpoint.step);
  const SeenRecords& first = members.front();
  if (!first.is_described) {
    fail(
        Code::run_mismatch,
        {.what = fmt::format("cannot {}: another training began it", goal.what),
         .where = fmt::format("the records of rank {} (the difference is unknown: {} is missing or damaged)",
                              first.files.rank, first.files.description_name()),
         .remedy = goal.remedy("Resume with the training that began the run, on as many ranks; or give the run another "
                               "name. Nothing was changed.")});
  }
  if (const std::vector<std::string> missing = ranks_without(members); !missing.empty()) {
    fail(Code::run_mismatch,
         {.what = fmt::format("cannot {}: no rank finds the records of rank{} {}", goal.what,
                              missing.size() == 1 ? "" : "s", joined(missing)),
          .where = fmt::format("{}-rank-{} in the directories of this job's ranks", goal.run, missing.front()),
          .needed = fmt::format("the records of all {} ranks that trained together", first.placement.ranks()),
          .available = texts_of(members),
          .remedy =
              goal.remedy(fmt::format("Start a rank on each machine that has some of them, or move their directories "
                                      "to one of these; else {} in a run of another name. Nothing was changed.",
                                      load))});
  }
  fail_without_common(members, goal, load);
}

}  // namespace

std::optional<offload::CommitPoint> newest_common(Seen ranks, offload::CommitPoint last) {
  if (ranks.empty()) return {};
  for (const auto& commit : ranks.front().commits) {
    if (commit.point <= last &&
        std::ranges::all_of(ranks, [&](const SeenRecords& rank) { return has(rank.commits, commit); }))
      return commit.point;
  }
  return {};
}

bool have_begun(Seen ranks, offload::CommitPoint last) {
  return std::ranges::any_of(ranks, [&](const SeenRecords& rank) {
    return std::ranges::any_of(rank.commits,
                               [&](const auto& commit) { return commit.point <= last && commit.step > 0; });
  });
}

SeenRecords seen_records(const RecordFiles& files, std::size_t seen_by, const offload::FoundRecords& found) {
  return {.seen_by = seen_by,
          .files = files,
          .run_id = found.shape.run_id,
          .digest = found.shape.content_digest,
          .commits = filled(found.commits),
          .lacks_records = found.commits.empty()};
}

bool SeenRecords::has(offload::CommitPoint point) const {
  return std::ranges::any_of(commits, [&](const Commit& commit) { return commit.point == point; });
}

void SeenRecords::drop(offload::CommitPoint point) {
  std::erase_if(commits, [&](const Commit& commit) { return commit.point == point; });
  lacks_records = true;
}

const WholeRun::Copy& WholeRun::nearest(std::size_t shard, std::size_t site) const {
  const std::vector<Copy>& known = copies.at(shard);
  const auto own = std::ranges::find(known, site, &Copy::site);
  return own == known.end() ? known.front() : *own;
}

const WholeRun::Copy* WholeRun::copy_of(std::size_t rank) const {
  for (const std::vector<Copy>& of_shard : copies) {
    const auto found = std::ranges::find(of_shard, rank, &Copy::rank);
    if (found != of_shard.end()) return &*found;
  }
  return nullptr;
}

offload::RecordShape WholeRun::shape_of(const RecordedState& state, std::uint64_t run_id) const {
  offload::RecordShape shape = state.shape();
  shape.run_id = run_id;
  shape.content_digest = digest;
  return shape;
}

std::optional<WholeRun> find_whole_run(Seen seen, offload::CommitPoint last) {
  std::set<Group> groups;
  for (const SeenRecords& records : seen)
    groups.insert(group_of(records));
  std::optional<WholeRun> newest;
  for (const Group& group : groups) {
    auto found = newest_of(members_of(seen, group), last);
    if (found && (!newest || newest->point < found->point)) newest = std::move(found);
  }
  return newest;
}

std::optional<WholeRun> newest_whole_run(Seen seen, const Goal& goal, const KnownCheckpoint& checkpoint,
                                         offload::CommitPoint last) {
  if (auto newest = find_whole_run(seen, last)) return newest;
  const Commits commits = commits_of(seen, last);
  const bool has_begun =
      std::ranges::any_of(commits, [&](const Commit& commit) { return commit.step > 0 || !goal.resumes(); });
  const auto begun = std::ranges::find_if(seen, [&](const SeenRecords& records) {
    return has_begun ? has(records.commits, commits.front()) : records.lacks_records;
  });
  if (begun == seen.end()) return {};
  fail_without_whole_run(members_of(seen, group_of(*begun)), goal, checkpoint);
}

void drop(std::vector<SeenRecords>& seen, const RecordFiles& files, std::size_t seen_by, offload::CommitPoint point) {
  for (SeenRecords& each : seen) {
    if (each.files == files && each.seen_by == seen_by) each.drop(point);
  }
}

std::uint64_t known_run_id(Seen seen) {
  const auto known = std::ranges::find_if(seen, [](const SeenRecords& each) { return each.run_id != 0; });
  return known == seen.end() ? 0 : known->run_id;
}

std::uint64_t next_incarnation(Seen seen) {
  std::uint64_t newest = 0;
  for (const SeenRecords& records : seen) {
    newest = std::max(newest, records.files.made_in);
    for (const Commit& commit : records.commits)
      newest = std::max(newest, commit.point.incarnation);
  }
  return newest + 1;
}

void require_one_run(Seen seen, const Goal& goal) {
  constexpr std::uint64_t unreadable = 0;
  const auto first = std::ranges::find_if(seen, [](const SeenRecords& each) { return each.run_id != unreadable; });
  const auto other = std::ranges::find_if(first, seen.end(), [&](const SeenRecords& each) {
    return each.run_id != unreadable && each.run_id != first->run_id;
  });
  require(other == seen.end(), Code::run_mismatch, [&] {
    const auto text = [](const SeenRecords& each) {
      const bool is_own = each.files.rank == each.seen_by;
      return fmt::format("rank {} has run {:#x}{}", each.files.rank, each.run_id,
                         is_own ? "" : fmt::format(", as rank {} finds", each.seen_by));
    };
    return Problem{
        .what = fmt::format("cannot {}: its directories belong to different runs", goal.what),
        .where = fmt::format("{}; {}", text(*first), text(*other)),
        .remedy = goal.remedy(
            "Give every rank its own directories of one run, or give the run another name. Nothing was changed.")};
  });
}

std::vector<SeenRecords> seen_by_all(Communicator& world, Seen mine) {
  std::string text;  // one line for each, of numbers
  for (const SeenRecords& each : mine) {
    const Placement& placement = each.placement;
    text += fmt::format("{} {} {} {:d} {} {} {:d} {:d} {:d} {:d} {} {} {} {}", each.site, each.files.rank,
                        each.files.made_in, each.files.is_mirror, each.run_id, each.digest, each.lacks_records,
                        each.has_newest, each.is_described, each.is_of_model, placement.shards, placement.replicas,
                        placement.parameter_replicas, each.commits.size());
    for (const auto& [point, step, label] : each.commits)
      text += fmt::format(" {} {} {} {}", point.incarnation, point.number, step, fmt::join(label, " "));
    text += '\n';
  }
  const std::vector<std::string> texts = texts_of_all(world, text);
  std::vector<SeenRecords> all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream numbers(texts[rank]);
    SeenRecords each{.seen_by = rank};
    std::size_t commits = 0;
    while (numbers >> each.site >> each.files.rank >> each.files.made_in >> each.files.is_mirror >> each.run_id >>
           each.digest >> each.lacks_records >> each.has_newest >> each.is_described >> each.is_of_model >>
           each.placement.shards >> each.placement.replicas >> each.placement.parameter_replicas >> commits) {
      each.commits.resize(commits);
      for (auto& [point, step, label] : each.commits)
        numbers >> point.incarnation >> point.number >> step >> label[0] >> label[1] >> label[2];
      all.push_back(each);
    }
  }
  return all;
}

}  // namespace ballast

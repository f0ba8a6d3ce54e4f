#include "zero/runs/search.h"

#include <fmt/ranges.h>
#include <sys/stat.h>

#include <sstream>

#include "zero/runs/joint_space.h"

namespace ballast {
namespace {

// Reads all bytes of records that are marked, and in place. Returns the ranks whose records are damaged at the run's commit.
std::vector<std::size_t> damaged_ranks(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                       Communicator& world) {
  std::vector<std::int64_t> is_damaged(world.size());
  on_all_ranks(world, [&] {
    if (!own.are_marked_damaged({own.rank(), run.made_in})) return;
    offload::RecordShape shape = own.shape;
    shape.run_id = known_run_id(seen);
    EarlierRecords records(own, run, shape);
    is_damaged[own.rank()] = records.are_intact({.rank = own.rank(), .seen_by = own.rank()}) ? 0 : 1;
  });
  world.all_reduce(is_damaged);
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < is_damaged.size(); ++rank) {
    if (is_damaged[rank] != 0) ranks.push_back(rank);
  }
  return ranks;
}

void log_damage(const WholeRun& run, const std::optional<WholeRun>& earlier, const OwnRun& own) {
  if (own.rank() > 0) return;
  const std::string what = earlier ? fmt::format("resumes after step {} instead", earlier->step)
                                   : "cannot go back: not all ranks have an earlier commit that is intact";
  own.warn(fmt::format("the only records of step {} of run \"{}\" are damaged: {}", run.step, own.name(), what));
}

}  // namespace

Sites::Sites(Communicator& world, const RecordOptions& options) : rank_(world.rank()) {
  const std::string machine = booted_machine();
  std::string mine = machine == unknown_machine ? fmt::format("that of rank {}", rank_) : machine;
  for (const std::filesystem::path& directory : options.directories) {
    struct stat found {};
    const bool is_there = ::stat(directory.c_str(), &found) == 0;
    mine += is_there ? fmt::format(" {}:{}", found.st_dev, found.st_ino) : fmt::format(" none of rank {}", rank_);
  }
  const std::vector<std::string> all = texts_of_all(world, mine);
  std::map<std::string, std::size_t> sites;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    site_of_.push_back(sites.emplace(all[rank], rank).first->second);
    if (all[rank] == mine) ranks_.push_back(rank);
  }
}

std::vector<RecordFiles> RunSearch::files() const {
  std::vector<RecordFiles> found;
  on_all_ranks(world_, [&] {
    found = record_files_on(drives_.options.directories.front(), drives_.name(),
                            [&](std::size_t rank) { return sites_.looks_at(rank); });
  });
  const auto by_rank = files_of_all(found);
  found.clear();
  for (const std::size_t rank : sites_.ranks())
    found.insert(found.end(), by_rank[rank].begin(), by_rank[rank].end());
  std::ranges::sort(found);
  return found;
}

std::vector<std::vector<RecordFiles>> RunSearch::files_of_all(std::span<const RecordFiles> mine) const {
  std::string text;
  for (const RecordFiles& files : mine)
    text += fmt::format("{} {} {:d}\n", files.rank, files.made_in, files.is_mirror);
  std::vector<std::vector<RecordFiles>> all;
  for (const std::string& of_rank : texts_of_all(world_, text)) {
    std::istringstream numbers(of_rank);
    all.emplace_back();
    for (RecordFiles files; numbers >> files.rank >> files.made_in >> files.is_mirror;)
      all.back().push_back(files);
  }
  return all;
}

RecordedState RunSearch::state_of(const WholeRun& run) const {
  const WholeRun::Copy& copy = run.copies.front().front();
  std::string text;
  on_all_ranks(world_, [&] {
    if (copy.seen_by != world_.rank()) return;
    text =
        run.digest == own_->shape.content_digest ? own_->description : description_of(run.files_of(copy), run.digest);
  });
  auto state = RecordedState::of(broadcast_text(world_, text, copy.seen_by));
  require(state.has_value(), Code::run_mismatch, [&] {
    return Problem{
        .what = fmt::format("cannot {}{}: its description is not as this version of Ballast writes it", goal_.what,
                            goal_.resumes() ? " on other ranks" : ""),
        .remedy = goal_.remedy(
            "Resume with the training that began the run; or give the run another name. Nothing was changed.")};
  });
  const auto difference = first_obstacle(state->saved(), own_->plan);
  require(!difference, Code::run_mismatch, [&] {
    return Problem{.what = fmt::format("cannot {}: it has {}, but this training has {}", goal_.what, difference->one,
                                       difference->other),
                   .remedy = goal_.remedy("Resume with the model and the optimizer that began the run; or give the run "
                                          "another name. Nothing was changed.")};
  });
  return std::move(*state);
}

SavedTensors EarlierRecords::tensors(const RecordedState& state, const Choose& choose) {
  SavedTensors tensors;
  for (const auto& [name, place] : state.places()) {
    SavedTensor saved = state.saved().tensors.at(name);
    saved.steps = run_.step;
    for (const auto& [shard, record, in_tile, range] : state.parts_of(name, {0, saved.elements()})) {
      const WholeRun::Copy* const copy = choose(shard, name, range);
      if (copy != nullptr)
        saved.pieces.push_back({range, place_of(*copy, record), in_tile, state.record_elements(place.first)});
    }
    tensors.emplace(name, std::move(saved));
  }
  return tensors;
}

bool is_in_place(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own, std::size_t ranks) {
  if (run.digest != own.shape.content_digest) return false;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const bool has_other =
        std::ranges::any_of(run.copies[shard_of(run.placement, rank)], [&](const WholeRun::Copy& copy) {
          return run.files_of(copy) != RecordFiles{rank, run.made_in};
        });
    const bool has_own = std::ranges::any_of(seen, [&](const SeenRecords& each) {
      return each.seen_by == rank && each.files == RecordFiles{rank, run.made_in} && each.digest == run.digest &&
             each.has(run.point) && !(has_other && each.lacks_records);
    });
    if (!has_own) return false;
  }
  return true;
}

std::optional<WholeRun> run_before_damage(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                          Communicator& world) {
  std::vector<SeenRecords> rest(seen.begin(), seen.end());
  std::optional<WholeRun> intact = run;
  while (intact && is_in_place(*intact, seen, own, world.size())) {  // else all bytes are checked where others are read
    const std::vector<std::size_t> damaged = damaged_ranks(*intact, seen, own, world);
    if (damaged.empty()) break;
    for (const std::size_t rank : damaged) {
      for (std::size_t seer = 0; seer < world.size(); ++seer)  // ranks that share a drive see the same file
        drop(rest, RecordFiles{rank, intact->made_in}, seer, intact->point);
    }
    intact = find_whole_run(rest, run.point);
  }
  if (intact && intact->point == run.point) return {};
  log_damage(run, intact, own);
  return intact;
}

}  // namespace ballast

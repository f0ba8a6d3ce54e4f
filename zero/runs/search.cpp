#include "zero/runs/search.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "zero/comm/on_all_ranks.h"
#include "zero/engine/record_lane.h"
#include "zero/plan/description.h"

namespace ballast {
namespace {

// Reads all bytes of records that are marked, and in place. Returns the ranks whose records are damaged at the run's commit.
std::vector<std::size_t> damaged_ranks(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                       const RunSearch& search, Communicator& world) {
  std::vector<std::int64_t> is_damaged(world.size());
  on_all_ranks(world, [&] {
    if (!search.is_marked_damaged({own.rank(), run.made_in})) return;
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
  if (own.options.log == nullptr || own.rank() > 0) return;
  const std::string what = earlier ? fmt::format("resumes after step {} instead", earlier->step)
                                   : "cannot go back: not all ranks have an earlier commit that is intact";
  own.options.log->warning(
      fmt::format("the only records of step {} of run \"{}\" are damaged: {}", run.step, own.name(), what));
}

}  // namespace

std::optional<offload::FoundRecords> RunSearch::found_in(const RecordFiles& files) const {
  try {
    return read_head(files);
  } catch (const Error& error) {
    const bool is_of_another_run = files.is_mirror && error.code() == Code::run_mismatch;
    if (!is_of_another_run && !is_damage(error)) throw;
    if (options_.log != nullptr) options_.log->warning(error.what());
    return {};
  }
}

std::optional<offload::FoundRecords> RunSearch::read_head(const RecordFiles& files) const {
  auto found = offload::RecordStore::look(drives(files), store_options(files, options_));
  require(!found || found->shape.rank == files.rank, Code::run_mismatch, [&] {
    return Problem{.what = fmt::format("cannot resume run \"{}\": this is the directory of rank {}", options_.run,
                                       found->shape.rank),
                   .where = directory_of(files).string(),
                   .needed = fmt::format("that of rank {}", files.rank),
                   .remedy = "Give every rank its own directories. Nothing was changed."};
  });
  if (found) require_joint(*found);
  return found;
}

// Alone it would be resumed from steps that the others may not have.
void RunSearch::require_joint(const offload::FoundRecords& found) const {
  const auto joint =
      std::ranges::find_if(found.commits, [](const auto& each) { return round_of(each.label).exists(); });
  require(own_ == nullptr || options_.resume_at || joint == found.commits.end(), Code::run_mismatch, [&] {
    return Problem{.what = fmt::format("cannot resume run \"{}\" alone: it is one of {} that are resumed together",
                                       options_.run, round_of(joint->label).members),
                   .remedy = "Resume all of them together; or give the run another name. Nothing was changed."};
  });
}

SeenRecords RunSearch::seen_in(const RecordFiles& files) const {
  const auto found = found_in(files);
  if (!found) return {.seen_by = world_.rank(), .files = files, .lacks_records = true};
  SeenRecords seen = seen_records(files, world_.rank(), *found);
  bool lacks_step = false;  // nothing is lost before the first one
  std::erase_if(seen.commits, [&](const auto& each) {
    const bool is_lacking = !has_commit(files, each.point);
    lacks_step = lacks_step || (is_lacking && each.step > 0);
    return is_lacking;
  });
  if (lacks_step || is_marked_damaged(files)) seen.lacks_records = true;
  if (own_ != nullptr && seen.digest == own_->shape.content_digest) {
    seen.is_described = seen.is_of_model = true;
    seen.placement = own_->plan.placement();
  } else if (const auto described = read_description(description_of(files, seen.digest))) {
    seen.is_described = true;
    seen.placement = described->placement;
    seen.is_of_model = own_ != nullptr && !first_obstacle(*described, own_->plan.model(), own_->plan.rule());
  }
  return seen;
}

std::vector<std::string> RunSearch::description_of(const RecordFiles& files, std::uint64_t digest) const {
  const auto lines = read_run_description(directory_of(files) / files.description_name());
  return digest_of(lines) == digest ? lines : std::vector<std::string>{};
}

std::vector<SeenRecords> RunSearch::find_all(std::span<const RecordFiles> files) const {
  std::vector<SeenRecords> mine;
  on_all_ranks(world_, [&] {
    for (const RecordFiles& each : files) {
      const SeenRecords seen = seen_in(each);
      if (!each.is_mirror || seen.run_id != 0) mine.push_back(seen);
    }
  });
  const std::vector<std::string> texts = texts_of_all(world_, to_text(mine));
  std::vector<SeenRecords> all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    std::ranges::move(seen_from(texts[rank], rank), std::back_inserter(all));
  require_one_run(all, options_.run);
  return all;
}

bool RunSearch::has_commit(const RecordFiles& files, offload::CommitPoint point) const {
  try {
    const auto found = found_in(files);
    return found && holds(files, *found, point);
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    if (options_.log != nullptr) options_.log->warning(error.what());
    return false;
  }
}

bool RunSearch::holds(const RecordFiles& files, const offload::FoundRecords& found, offload::CommitPoint point) const {
  if (std::ranges::find(found.commits, point, &offload::FoundRecords::Found::point) == found.commits.end())
    return false;
  offload::StoreOptions unchanged = store_options(files, options_);
  unchanged.file.writable = false;
  if (const auto missing = missing_file(drives(files), unchanged)) {
    if (options_.log != nullptr) {
      options_.log->warning(
          fmt::format("the records of rank {} do not count: {} is missing", files.rank, missing->string()));
    }
    return false;
  }
  return offload::RecordStore::open(found.shape, drives(files), unchanged).go_to(point);
}

void RunSearch::require_readable_drives(std::span<const RecordFiles> files) const {
  for (const RecordFiles& each : files) {
    try {
      const auto found = read_head(each);
      if (!found) continue;
      for (const auto& commit : found->commits)
        holds(each, *found, commit.point);
    } catch (const Error& error) {
      if (error.code() == Code::file_call) throw;
    }
  }
}

bool RunSearch::forget(std::vector<SeenRecords>& seen, offload::CommitPoint point,
                       std::span<const RecordFiles> damaged) const {
  std::string mine;
  for (const RecordFiles& files : damaged)
    mine += fmt::format("{} {} {:d}\n", files.rank, files.made_in, files.is_mirror);
  const std::vector<std::string> texts = texts_of_all(world_, mine);
  bool is_any = false;
  for (std::size_t seer = 0; seer < texts.size(); ++seer) {
    RecordFiles files;
    for (std::istringstream text(texts[seer]); text >> files.rank >> files.made_in >> files.is_mirror;) {
      is_any = true;
      drop(seen, files, seer, point);
    }
  }
  return is_any;
}

// Every rank that has saved one knows it, and some of them may be lost.
KnownCheckpoint RunSearch::newest_checkpoint(std::span<const RecordFiles> files) const {
  std::string mine;
  on_all_ranks(world_, [&] {
    for (const RecordFiles& each : files) {
      const KnownCheckpoint found = newest_checkpoint_of(directory_of(each));
      if (!found.path.empty()) mine += fmt::format("{} {}\n", found.step, found.path);
    }
  });
  KnownCheckpoint newest;
  for (const std::string& text : texts_of_all(world_, mine)) {
    for (const std::string& line : lines_of(text)) {
      const std::size_t space = line.find(' ');
      const std::uint64_t step = std::stoull(line);
      if (newest.path.empty() || step > newest.step) newest = {step, line.substr(space + 1)};
    }
  }
  return newest;
}

offload::RecordStore* EarlierRecords::opened(const WholeRun::Copy& copy) {
  const auto [found, is_new] = stores_.try_emplace(name_of(copy));
  if (is_new) {
    const RecordFiles files = run_.files_of(copy);
    offload::RecordShape shape = shape_;
    shape.rank = static_cast<std::uint32_t>(copy.rank);
    offload::StoreOptions unchanged = own_.files_of(files);
    unchanged.file.writable = false;
    offload::RecordStore store = offload::RecordStore::open(shape, own_.drives(files), unchanged);
    if (store.go_to(run_.point)) found->second.emplace(std::move(store));
  }
  return found->second ? &*found->second : nullptr;
}

offload::RecordStore& EarlierRecords::store_of(const WholeRun::Copy& copy) {
  offload::RecordStore* const store = opened(copy);
  require(store != nullptr, Code::bad_record, [&] {
    return Problem{.what = "cannot take over records: some of them are missing or damaged",
                   .where = run_.files_of(copy).directory(own_.options.directories.front(), own_.name())};
  });
  return *store;
}

bool EarlierRecords::are_intact(const WholeRun::Copy& copy) {
  try {
    for (std::size_t record = 0; record < shape_.tiles; ++record)
      read(copy, record);
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    if (own_.options.log != nullptr) own_.options.log->warning(error.what());
    return false;
  }
  return true;
}

std::span<std::byte> EarlierRecords::read(const WholeRun::Copy& copy, std::size_t record) {
  offload::RecordStore& store = store_of(copy);
  const std::pair wanted(name_of(copy), record);
  if (in_memory_ == wanted) return payload_;
  if (!memory_) memory_ = map_host_pages(store.record_bytes(), "a record that is taken over");
  in_memory_ = {{SIZE_MAX, false}, 0};  // invalid until the record is there
  payload_ = store.read(record, {memory_.get(), store.record_bytes()}).payload();
  in_memory_ = wanted;
  return payload_;
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
                                          const RunSearch& search, Communicator& world) {
  std::vector<SeenRecords> rest(seen.begin(), seen.end());
  std::optional<WholeRun> intact = run;
  while (intact && is_in_place(*intact, seen, own, world.size())) {  // else all bytes are checked where others are read
    const std::vector<std::size_t> damaged = damaged_ranks(*intact, seen, own, search, world);
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

#include "zero/runs/search.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "zero/comm/on_all_ranks.h"
#include "zero/engine/joint_round.h"
#include "zero/plan/description.h"

namespace ballast {

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

}  // namespace ballast

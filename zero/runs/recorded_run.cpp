#include "zero/runs/recorded_run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "kernels/state_access.h"

namespace ballast {

RecordedRun::RecordedRun(const std::filesystem::path& directory, const std::string& name)
    : options_{.directories = {directory}, .run = name, .allow_network = true, .log = &quiet_},
      seen_(search_.find_all(record_files_on(directory, name))),
      run_(whole_run()),
      state_(recorded_state()) {
  const Model& model = state_.described().model;
  const auto named = names_in_runs(model);
  for (std::size_t unit = 0; unit < named.size(); ++unit) {
    for (std::size_t tensor = 0; tensor < named[unit].size(); ++tensor) {
      if (model.units[unit].tensors[tensor].frozen) continue;
      tensors_.push_back(model.units[unit].tensors[tensor]);
      tensors_.back().name = named[unit][tensor];
    }
  }
}

WholeRun RecordedRun::whole_run() const {
  auto found = newest_whole_run(seen_, goal_);
  require(found.has_value(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot read run \"{}\": it has no records of a step", options_.run),
                   .where = options_.directories.front().string(),
                   .needed = "a run that has begun, or a checkpoint"};
  });
  return std::move(*found);
}

RecordedState RecordedRun::recorded_state() {
  const auto lines = search_.description_of(run_.files_of(run_.copies.front().front()), run_.digest);
  const auto described = read_description(lines);
  const auto known = described ? names_of_rule(described->rule) : std::nullopt;
  auto found = known ? RecordedState::of(lines, *known) : std::nullopt;
  require(found.has_value(), Code::bad_record, [&] {
    return Problem{.what = fmt::format("cannot {}: its description is missing or damaged", goal_.what),
                   .where = options_.directories.front().string()};
  });
  names_ = *known;
  return std::move(*found);
}

void RecordedRun::copy(const std::string& tensor, Range range, const TileMemory& into) {
  for (const auto& [shard, record, in_tile, part] : state_.parts_of(tensor, range)) {
    std::byte* const payload = records_.read(run_.nearest(shard, 0), record).data();
    kernels::copy_state(kernels::part(state_.tile(record, payload), in_tile, part.count),
                        kernels::part(into, part.first - range.first, part.count));
  }
}

std::vector<std::string> runs_in(const std::filesystem::path& directory) {
  std::set<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(directory, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    const std::size_t rank = name.rfind("-rank-");
    if (rank == std::string::npos || rank == 0 || names.contains(name.substr(0, rank))) continue;
    std::error_code unreadable;  // another user's folder is none of ours
    const std::filesystem::directory_iterator files(entry->path(), unreadable);
    const bool has_records =
        !unreadable && std::any_of(begin(files), std::filesystem::directory_iterator(),
                                   [](const auto& file) { return file.path().extension() == ".records"; });
    if (has_records) names.insert(name.substr(0, rank));
  }
  return {names.begin(), names.end()};
}

}  // namespace ballast

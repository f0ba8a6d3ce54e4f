#include "zero/runs/recorded_run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "kernels/state_access.h"
#include "zero/comm/thread_communicator.h"
#include "zero/runs/search.h"

namespace ballast {
namespace {

[[noreturn]] void fail_unreadable(const std::string& goal, const std::filesystem::path& directory) {
  fail(Code::bad_record,
       {.what = fmt::format("cannot {}: its description is missing or damaged", goal), .where = directory.string()});
}

}  // namespace

struct RecordedRun::Impl {
  Impl(const std::filesystem::path& directory, const std::string& name)
      : options{.directories = {directory}, .run = name, .allow_network = true, .log = &quiet},
        seen(search.find_all(record_files_on(directory, name))),
        run(whole_run()),
        description(search.description_of(run.files_of(run.copies.front().front()), run.digest)),
        state(state_of(description)) {
    const Model& model = state.described().model;
    const auto named = names_in_runs(model);
    for (std::size_t unit = 0; unit < named.size(); ++unit) {
      for (std::size_t tensor = 0; tensor < named[unit].size(); ++tensor) {
        if (model.units[unit].tensors[tensor].frozen) continue;
        tensors.push_back(model.units[unit].tensors[tensor]);
        tensors.back().name = named[unit][tensor];
      }
    }
  }

  WholeRun whole_run() const {
    auto found = newest_whole_run(seen, goal);
    require(found.has_value(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot read run \"{}\": it has no records of a step", options.run),
                     .where = options.directories.front().string(),
                     .needed = "a run that has begun, or a checkpoint"};
    });
    return std::move(*found);
  }

  RecordedState state_of(const std::vector<std::string>& lines) {
    const auto described = read_description(lines);
    if (!described) fail_unreadable(goal.what, options.directories.front());
    const auto known = names_of_rule(described->rule);
    auto found = known ? RecordedState::of(lines, *known) : std::nullopt;
    if (!found) fail_unreadable(goal.what, options.directories.front());
    names = *known;
    return std::move(*found);
  }

  Log quiet{[](Level, std::string_view) {}};
  RecordOptions options;
  const Goal goal{options.run, fmt::format("read run \"{}\"", options.run),
                  "Bring the records of all ranks to the directory. If a training continues the run, wait until it has "
                  "ended."};
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> alone = lone_communicator(*backend);
  std::unique_ptr<offload::IoQueue> queue = offload::open_queue({.log = &quiet});
  std::vector<offload::IoQueue*> queues{queue.get()};
  RunSearch search{options, queues, *alone, goal};
  std::vector<SeenRecords> seen;
  WholeRun run;
  std::vector<std::string> description;
  optim::StateNames names{};
  RecordedState state;
  EarlierRecords records{options, queues, run, run.shape_of(state, known_run_id(seen))};
  std::vector<Tensor> tensors{};
};

RecordedRun::RecordedRun(const std::filesystem::path& directory, const std::string& name)
    : impl_(std::make_unique<Impl>(directory, name)) {}
RecordedRun::~RecordedRun() = default;

std::uint64_t RecordedRun::step() const { return impl_->run.step; }
std::size_t RecordedRun::ranks() const { return impl_->run.placement.ranks(); }
const std::string& RecordedRun::rule() const { return impl_->state.described().rule; }
const optim::StateNames& RecordedRun::names() const { return impl_->names; }
const std::vector<Tensor>& RecordedRun::tensors() const { return impl_->tensors; }

std::vector<std::byte> RecordedRun::note() {
  const auto note = impl_->records.note_of(impl_->run.copies.front().front());
  return {note.begin(), note.end()};
}

void RecordedRun::copy(const std::string& tensor, Range range, const TileMemory& into) {
  for (const auto& [shard, record, in_tile, part] : impl_->state.parts_of(tensor, range)) {
    std::byte* const payload = impl_->records.read(impl_->run.nearest(shard, 0), record).data();
    kernels::copy_state(kernels::part(impl_->state.tile(record, payload), in_tile, part.count),
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

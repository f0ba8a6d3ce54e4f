#include "zero/runs/files.h"

#include <fstream>
#include <string_view>

#include "kernels/runtime/system_files.h"
#include "offload/file.h"
#include "offload/run_directory.h"

namespace ballast {
namespace {

constexpr std::string_view own_name = "state";
constexpr std::string_view mirror_name = "mirror";
constexpr std::string_view records_end = ".records";
constexpr std::string_view description_end = ".description";
constexpr std::string_view checkpoint_name = "newest-checkpoint";

// Returns the entries of a directory; none if it is missing.
std::filesystem::directory_iterator entries_of(const std::filesystem::path& directory) {
  std::error_code failed;
  const std::filesystem::directory_iterator entries(directory, failed);
  if (failed && failed != std::errc::no_such_file_or_directory) offload::fail_file("list", directory, failed.value());
  return failed ? std::filesystem::directory_iterator() : entries;
}

bool without_end(std::string_view& text, std::string_view end) {
  const bool has_end = text.ends_with(end);
  if (has_end) text.remove_suffix(end.size());
  return has_end;
}

// Returns the records of a rank that have this name.
std::optional<RecordFiles> files_named(std::string_view file, std::size_t rank) {
  if (!without_end(file, records_end)) return {};
  for (const bool is_mirror : {false, true}) {
    const std::string_view begin = is_mirror ? mirror_name : own_name;
    if (!file.starts_with(begin)) continue;
    const std::string_view rest = file.substr(begin.size());
    if (rest.empty()) return RecordFiles{.rank = rank, .is_mirror = is_mirror};
    const auto made_in = rest.front() == '-' ? whole_number<std::uint64_t>(rest.substr(1)) : std::nullopt;
    if (made_in) return RecordFiles{rank, *made_in, is_mirror};
  }
  return {};
}

// Visits the files in the directories of these ranks of the run.
void for_each_file(const std::filesystem::path& drive, const std::string& run, const IsWanted& is_wanted,
                   const std::function<void(const std::filesystem::path& file, std::size_t rank)>& visit) {
  const std::string begin = run + "-rank-";
  for (const auto& directory : entries_of(drive)) {
    const std::string name = directory.path().filename().string();
    const auto rank =
        name.starts_with(begin) ? whole_number<std::size_t>(std::string_view(name).substr(begin.size())) : std::nullopt;
    if (!rank || !is_wanted(*rank) || !directory.is_directory()) continue;
    for (const auto& file : entries_of(directory.path()))
      visit(file.path(), *rank);
  }
}

}  // namespace

std::filesystem::path RecordFiles::directory(const std::filesystem::path& drive, const std::string& run) const {
  return drive / fmt::format("{}-rank-{}", run, rank);
}

std::string RecordFiles::name() const {
  const std::string_view begin = is_mirror ? mirror_name : own_name;
  return made_in == 0 ? std::string(begin) : fmt::format("{}-{}", begin, made_in);
}
std::string RecordFiles::description_name() const { return fmt::format("{}{}", name(), description_end); }

std::vector<RecordFiles> record_files_on(const std::filesystem::path& drive, const std::string& run,
                                         const IsWanted& is_wanted) {
  std::vector<RecordFiles> found;
  for_each_file(drive, run, is_wanted, [&](const std::filesystem::path& path, std::size_t rank) {
    if (const auto files = files_named(path.filename().string(), rank)) found.push_back(*files);
  });
  std::ranges::sort(found);
  return found;
}

std::vector<Leftover> leftovers_on(const std::filesystem::path& drive, const std::string& run,
                                   const IsWanted& is_wanted) {
  std::vector<Leftover> found;
  for_each_file(drive, run, is_wanted, [&](const std::filesystem::path& path, std::size_t rank) {
    const std::string file = path.filename().string();
    std::string_view name = file;
    const bool is_unfinished = without_end(name, offload::unfinished_end);
    if (!without_end(name, records_end) && !without_end(name, description_end)) return;
    const std::string records = fmt::format("{}{}", name, records_end);
    const auto files = files_named(records, rank);
    if (!files || (!is_unfinished && std::filesystem::exists(path.parent_path() / records))) return;
    found.push_back({*files, path});
  });
  return found;
}

void remove_records(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files) {
  const std::filesystem::path directory = files.directory(drive, run);
  const std::filesystem::path records = directory / fmt::format("{}{}", files.name(), records_end);
  std::error_code failed;
  std::filesystem::remove(records, failed);
  require(!std::filesystem::exists(records), Code::file_call, [&] {
    return Problem{
        .what = fmt::format("cannot remove records that this run does not need any more: {}", failed.message()),
        .where = records.string()};
  });
  offload::remove_damage_mark(records);
  std::filesystem::remove(directory / files.description_name(), failed);
  if (std::filesystem::exists(directory)) offload::flush_directory(directory);
}

void remove_empty_directory(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files) {
  const std::filesystem::path directory = files.directory(drive, run);
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(directory, failed)) {
    if (entry.path().filename() != offload::lock_name && entry.path().filename() != checkpoint_name) return;
  }
  std::filesystem::remove(directory / checkpoint_name, failed);
  std::filesystem::remove(directory / offload::lock_name, failed);
  std::filesystem::remove(directory, failed);
}

KnownCheckpoint newest_checkpoint_of(const std::filesystem::path& directory) {
  std::ifstream file(directory / checkpoint_name);
  KnownCheckpoint found;
  file >> found.step;
  file.ignore();
  if (!std::getline(file, found.path)) return {};
  return found;
}

void write_newest_checkpoint(const std::filesystem::path& directory, const KnownCheckpoint& newest) {
  offload::write_text(directory / checkpoint_name, fmt::format("{} {}\n", newest.step, newest.path));
}

}  // namespace ballast

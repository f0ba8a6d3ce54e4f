// The files of a run on a drive: their names, the run's description, and which there are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ballast {

// One rank's records of a run, which have one name in the directories of all drives of the rank.
struct RecordFiles {
  std::size_t rank = 0;
  std::uint64_t made_in = 0;  // the incarnation that took the run over from others to make them; 0: those it began with
  bool is_mirror = false;     // kept by a peer of the rank, on its own drives

  std::filesystem::path directory(const std::filesystem::path& drive, const std::string& run) const;
  std::string name() const;              // "state", or "state-7"; of a mirror "mirror", or "mirror-7"
  std::string description_name() const;  // of the file, in the first directory

  auto operator<=>(const RecordFiles&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// The files that have records on this drive, of any rank, in order.
std::vector<RecordFiles> record_files_on(const std::filesystem::path& drive, const std::string& run);

// A file that a killed process has left: it is not finished, or a description without records.
struct Leftover {
  RecordFiles files{};  // to which it would belong
  std::filesystem::path path{};
};
std::vector<Leftover> leftovers_on(const std::filesystem::path& drive, const std::string& run);

// Removes the files from this drive, where other ranks may remove them at the same time. They are gone for good when this
// returns. Throws B3201 if records stay.
void remove_records(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files);

// Removes the rank's directory from this drive, if it has no other records.
void remove_empty_directory(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files);

// A checkpoint that a training of the run has saved or loaded.
struct KnownCheckpoint {
  std::uint64_t step = 0;
  std::string path{};  // empty: none is known
};

// The newest one of which a text file in the rank's directory tells: `newest-checkpoint`, with the step, a space and the path.
KnownCheckpoint newest_checkpoint_of(const std::filesystem::path& directory);

void write_run_description(const std::filesystem::path& file, const std::vector<std::string>& lines);
std::vector<std::string> read_run_description(const std::filesystem::path& file);  // no lines: it is missing or damaged

}  // namespace ballast

// The files of a checkpoint, which python/ballast/checkpoint/FORMAT.md describes. They may be damaged or forged, so everything that is
// read is checked: a failure is B3202, with the file and what is wrong.
#pragma once

#include <ballast/error.h>
#include <ballast/local_state.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/chunk_file.h"
#include "offload/run_directory.h"
#include "optim/state_layout.h"

namespace ballast {

// Consecutive elements of a tensor, in a chunk of a file. A record is a chunk that may hold elements of other tensors, too.
struct SavedPiece {
  Range range{};
  offload::ChunkPlace place{};
  std::size_t in_record = 0;  // the first element
};

std::string torch_name(DType dtype);

// A tensor of a checkpoint.
struct SavedTensor {
  std::string role{};   // such as "trained", "frozen" and "buffer"
  std::string dtype{};  // torch's name
  std::size_t item_bytes = 0;
  std::vector<std::size_t> shape{};
  std::optional<ChunkKind> kind{};   // of chunks with state; none: they are the elements as they are
  std::uint64_t steps = 0;           // steps that have trained it
  std::size_t record_elements = 0;   // elements for which each record that holds it is laid out; 0: it is in no records
  std::vector<SavedPiece> pieces{};  // in order; they hold each element once

  std::size_t elements() const;
  std::size_t chunk_bytes(std::size_t count) const { return kind ? kind->bytes(count) : count * item_bytes; }
  std::vector<SavedPiece> pieces_of(const Range& range) const;  // those that hold these elements, in order
  // The elements of a piece with their state, in the memory of its chunk.
  TileMemory tile_of(const std::string& name, const SavedPiece& piece, std::byte* chunk) const;
};
using SavedTensors = std::map<std::string, SavedTensor>;

// What a rank has saved with its tensors.
struct SavedExtra {
  std::filesystem::path file{};
  std::size_t bytes = 0;
  std::uint64_t seal = 0;
  bool is_raw = false;  // bytes as they are, not an object of torch.save()

  std::string read() const;
};

// A group of parameters, by name. The options are JSON, as Python writes it.
struct SavedGroup {
  std::vector<std::string> parameters{};
  std::string options{};
};

struct SavedOptimizer {
  std::uint64_t step = 0;
  std::uint64_t skipped = 0;
  std::string optimizer{};                       // its class
  std::map<std::string, std::string> moments{};  // torch's names of "momentum" and "variance", as far as it has them
  std::vector<SavedGroup> groups{};
  bool own_step = false;         // its own step makes the updates, with values of its own
  std::string outer_identity{};  // names a training on several hosts with an outer optimizer; the same on all of them
};

// Torch's names of the moments, as a checkpoint has them.
std::map<std::string, std::string> moments_of(const optim::StateNames& names);

struct SavedCheckpoint {
  std::string folder{};  // the folder next to the manifest with the files of the ranks
  std::size_t ranks = 1;
  std::vector<SavedOptimizer> optimizers{};  // there is at least one
  SavedTensors tensors{};
  std::string converted_from{};  // what `ballast convert` has read, or that a training in C++ wrote it
  std::string written_by{};
  std::vector<std::uint64_t> seals{};          // those of the ranks' indexes
  std::vector<std::filesystem::path> files{};  // with the chunks of each rank
  std::vector<SavedExtra> extras{};            // one for each rank

  std::uint64_t step() const;  // the most steps that an optimizer has made
};

inline constexpr const char* manifest_name = "checkpoint.json";

// The text of a directory's manifest, which names the current checkpoint; none if there is none.
std::optional<std::string> read_manifest(const std::filesystem::path& directory);
// The content of a manifest. The pieces and the extras are left out, because they are in the files that it names.
SavedCheckpoint parse_manifest(const std::string& manifest, const std::filesystem::path& file);
// The text of a rank's index, in the folder that the manifest names.
std::string read_index(const std::filesystem::path& folder, std::size_t rank);
// `indexes`: the texts of all ranks' indexes; empty: they are read.
SavedCheckpoint parse_checkpoint(const std::filesystem::path& directory, const std::string& manifest,
                                 const std::vector<std::string>& indexes = {});

// The manifest of a checkpoint whose ranks have written their files to the folder.
std::string manifest_of(const SavedCheckpoint& checkpoint, const std::filesystem::path& folder);

// Reads pieces in the order in which they are wanted, ahead of their use, and others after those when they are asked for. One that
// is wanted several times in a row is read once. Used by one thread.
class PieceReader {
 public:
  // Throws B3202 for a file that is too short for its pieces.
  PieceReader(std::vector<std::filesystem::path> files, const std::vector<SavedPiece>& wanted);

  // Returns the chunk of the next piece, or of the same one again, which stays valid until the next call. Throws B3202, with the
  // elements of the tensor, if the chunk is damaged; later pieces can still be read.
  std::span<const std::byte> go_to(const SavedPiece& piece, const std::string& name);

  // Copies elements of a tensor, from `first` on, into a tile of as many: with their state, or the parameter alone. A tile of bytes
  // gets them as they are.
  void copy(const std::string& name, const SavedTensor& tensor, std::size_t first, const TileMemory& into);
  // Copies elements without state as they are.
  void copy(const std::string& name, const SavedTensor& tensor, const Range& range, std::byte* into);

 private:
  std::vector<std::filesystem::path> files_;
  std::unique_ptr<offload::IoQueue> queue_ = offload::open_queue();
  std::optional<offload::ChunkReader> chunks_{};
  std::size_t ahead_ = 0;  // chunks that it still has
  std::optional<offload::ChunkPlace> current_{};
  std::optional<Error> failure_{};  // of its read
  std::span<const std::byte> now_{};
};

// The files of a rank while they are written, by one thread.
class RankFiles {
 public:
  RankFiles(const std::filesystem::path& folder, std::size_t rank);

  // Elements of a tensor, as they are or as those of its part.
  void append(const std::string& tensor, const Range& range, std::span<const std::byte> chunk);
  void append(const std::string& tensor, const Range& range, const StatePart& part);
  // The rank's index gets its name last: where it is, all of its files are complete and on the drive. Returns the bytes of the data.
  std::uint64_t finish(std::span<const std::byte> extra, bool is_raw);

 private:
  std::filesystem::path folder_;
  std::size_t rank_;
  std::unique_ptr<offload::IoQueue> queue_ = offload::open_queue();
  offload::ChunkWriter data_;
  std::vector<std::byte> chunk_{};
  std::map<std::string, std::vector<SavedPiece>> chunks_{};
};

// Makes a directory and its parents. Those that are made are on the drive when this returns. The parent of an existing one needs no
// permission to read it.
void make_directories(const std::filesystem::path& path);

// A directory while one job saves to it. Rank 0 of the job uses it, and holds the directory's lock.
class CheckpointDirectory {
 public:
  // Makes the directory and its parents. Throws B2204 if another job saves to it.
  explicit CheckpointDirectory(const std::filesystem::path& path);

  // Why it is not locked; empty: it is. Nothing prevents two jobs from saving to it at once then, and folders of stopped savings stay.
  const std::string& unlocked_because() const { return unlocked_because_; }

  std::optional<std::string> current() const;  // the folder that the manifest names; none if it cannot be read

  // Makes a folder, and removes those of savings that were stopped.
  void create(const std::string& folder);
  // Replaces the manifest, once all ranks have written their files. Readers find the old checkpoint before, and the new one afterwards.
  void make_current(const std::string& folder, const std::string& manifest);
  // Removes the folders that the manifest does not name.
  void remove_stale() const;
  // Removes the files of a saving that failed, unless the manifest names them, or cannot be read.
  void discard(const std::string& folder) const;
  void release() noexcept { lock_.reset(); }

 private:
  std::filesystem::path path_;
  std::optional<offload::DirectoryLock> lock_{};
  std::string unlocked_because_{};
  std::string replaced_{};  // the folder of the checkpoint that the new one has replaced
};

}  // namespace ballast

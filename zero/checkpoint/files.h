// The files of a checkpoint, which python/ballast/checkpoint/FORMAT.md describes. They may be damaged or forged, so everything that is
// read is checked: a failure is B3202, with the file and what is wrong.
#pragma once

#include <ballast/error.h>
#include <ballast/local_state.h>
#include <ballast/placement.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "offload/chunk_file.h"
#include "optim/state_layout.h"

namespace ballast {

// Consecutive elements of a tensor, in a chunk of a file. A record is a chunk that may hold elements of other tensors, too.
struct SavedPiece {
  Range range{};
  offload::ChunkPlace place{};
  std::size_t in_record = 0;        // the first element
  std::size_t record_elements = 0;  // those for which the record is laid out; 0: it is a chunk
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
  std::vector<SavedPiece> pieces{};  // in order; they hold each element once

  std::size_t elements() const;
  DType parameter_dtype(const std::string& name) const;  // throws B1001 where the library has no such numbers
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

// How the ranks of a run cut their trained tensors into records.
struct SavedLayout {
  struct Unit {
    std::vector<std::string> tensors{};  // names, in order
    std::size_t tile_elements = 0;
  };
  Placement placement{};       // without tiers
  std::size_t own_values = 0;  // values of the trainer's own that a record has of each element
  std::vector<Unit> units{};
};

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
  std::optional<SavedLayout> layout{};         // of a run, whose manifest names neither folder nor indexes

  std::uint64_t step() const;  // the most steps that an optimizer has made
};

inline constexpr const char* manifest_name = "checkpoint.json";

// Whether a folder's name is like step-12-8c31f0a2.
bool is_folder(std::string_view name);
std::string current_folder(const std::filesystem::path& directory);  // named by the manifest; empty: there is none

// The text of a directory's manifest, which names the current checkpoint; none if there is none.
std::optional<std::string> read_manifest(const std::filesystem::path& directory);
// The content of a manifest. The pieces and the extras are left out, because they are in the files that it names.
SavedCheckpoint parse_manifest(const std::string& manifest, const std::filesystem::path& file);
// The text of a rank's index, in the folder that the manifest names.
std::string read_index(const std::filesystem::path& folder, std::size_t rank);
// `indexes`: the texts of all ranks' indexes; empty: they are read.
SavedCheckpoint parse_checkpoint(const std::filesystem::path& directory, const std::string& manifest,
                                 const std::vector<std::string>& indexes = {});

// The manifest of a run, which is the same on all of its ranks: it describes what their records hold. Trainings with equal ones can
// open each other's records. Facts that may change from one start to the next are left out: learning rates, parameter groups, tiers.
std::string run_manifest_of(const SavedCheckpoint& run);
std::string read_run_manifest(const std::filesystem::path& file);  // empty: it is missing or damaged
SavedCheckpoint parse_run_manifest(const std::string& manifest, const std::filesystem::path& file);

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
  // Elements of the record that was cloned last. clone() returns false where the file system cannot: see ChunkWriter::clone().
  bool clone(const offload::OpenRecord& record);
  void append_cloned(const std::string& tensor, const Range& range, std::size_t in_record);
  // The rank's index gets its name last: where it is, all of its files are complete and on the drive. Returns the bytes of the data.
  std::uint64_t finish(std::span<const std::byte> extra, bool is_raw);

 private:
  std::filesystem::path folder_;
  std::size_t rank_;
  std::unique_ptr<offload::IoQueue> queue_ = offload::open_queue();
  offload::ChunkWriter data_;
  std::vector<std::byte> chunk_{};
  std::map<std::string, std::vector<SavedPiece>> chunks_{};
  std::vector<SavedPiece> records_{};  // without a range
};

}  // namespace ballast

// The bytes of record files, without files: where each thing lies, how it is sealed, how it is checked. FORMAT.md describes
// them for readers of other programs.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "offload/file.h"

namespace ballast::offload {

inline constexpr std::uint32_t format_version = 2;
inline constexpr std::size_t commit_bytes = 16 * block_bytes;
inline constexpr std::size_t most_user_bytes = commit_bytes - 80;

// What the owner of the records decides. Run and rank are part of every seal, so that a record of another run or of another
// rank is not taken for ours.
struct RecordShape {
  std::uint64_t run_id = 0;
  std::uint32_t rank = 0;
  std::size_t tiles = 0;
  std::size_t payload_bytes = 0;     // of a tile
  std::size_t first_bytes = 0;       // of its first region, which can be read alone: the parameter
  std::uint64_t content_digest = 0;  // of the owner's description of the payloads
};

// Names a commit of a run, the same on all ranks. Each start of the run is an incarnation, with a number above all before
// it; commits are counted. So two histories that split after a crash never share a point.
struct CommitPoint {
  std::uint64_t incarnation = 0;  // 0: of records that belong to no run, or to none yet
  std::uint64_t number = 0;

  auto operator<=>(const CommitPoint&) const = default;
};

// Where records lie. Each tile has two places, for odd and for even generations. Tiles go to the files in turn.
//
//   file:    identity | commit slot 0 | commit slot 1 | tile, even | tile, odd | next tile, even | ...
//   record:  head, one block | payload | up to a whole block
class RecordPlaces {
 public:
  RecordPlaces(const RecordShape& shape, std::size_t files);

  std::size_t record_bytes() const { return record_bytes_; }
  std::size_t first_record_bytes() const { return first_record_bytes_; }  // enough to read the first region
  std::size_t file_of(std::size_t tile) const { return tile % files_; }
  std::uint64_t offset_of(std::size_t tile, std::uint64_t generation) const;
  static std::uint64_t commit_offset(std::uint64_t generation) { return block_bytes + generation % 2 * commit_bytes; }
  std::uint64_t file_bytes(std::size_t file) const;

 private:
  std::size_t tiles_;
  std::size_t files_;
  std::size_t record_bytes_;
  std::size_t first_record_bytes_;
};

// The seals of a tile's two regions. Kept in memory too: a record that was never written, or written to another place,
// is whole and sealed, but not the one that is expected.
struct Seals {
  std::uint64_t first = 0;
  std::uint64_t rest = 0;
  bool operator==(const Seals&) const = default;
};

struct RecordName {
  std::size_t tile = 0;
  std::uint64_t generation = 0;
};

std::span<std::byte> payload_of(const RecordShape& shape, std::span<std::byte> record);

// Fills in the head, zeroes what follows the payload.
Seals seal_record(const RecordShape& shape, RecordName name, std::span<std::byte> record);

// What is wrong with a record's head, empty if nothing is; and what it seals.
struct HeadCheck {
  std::string problem{};
  Seals seals{};
};
HeadCheck check_head(const RecordShape& shape, RecordName name, std::span<const std::byte> head);

// What is wrong with a record, empty if nothing is. One that was read in part has only its first region checked.
std::string check_record(const RecordShape& shape, RecordName name, const Seals& expected, std::span<std::byte> record);

struct Commit {
  std::uint64_t generation = 0;
  std::uint64_t step = 0;
  std::uint64_t seals_hash = 0;  // of all tiles, in order
  CommitPoint point{};
  std::span<const std::byte> user{};
};

void write_commit(const RecordShape& shape, const Commit& commit, std::span<std::byte> slot);
std::optional<Commit> read_commit(const RecordShape& shape, std::span<const std::byte> slot);  // none: torn or foreign

std::uint64_t hash_of(std::span<const Seals> seals);

struct FileName {
  std::size_t file = 0;
  std::size_t files = 1;
};

// What the first block of a file says of it.
struct Identity {
  RecordShape shape{};
  FileName name{};
};

void write_identity(const RecordShape& shape, FileName name, std::span<std::byte> block);

// Throws where the block is damaged or not ours (B3202), or of a newer format (B1008) or an older one (B1010).
Identity read_identity(std::span<const std::byte> block, const std::filesystem::path& path);

// Throws B1009 where the block is that of another file of the run.
void check_name(const Identity& found, FileName name, const std::filesystem::path& path);

// Throws what is wrong, as the two above do; and B1009 for another run, rank or shape.
void check_identity(const RecordShape& shape, FileName name, std::span<const std::byte> block,
                    const std::filesystem::path& path);

}  // namespace ballast::offload

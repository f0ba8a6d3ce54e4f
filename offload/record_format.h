// The bytes of record files: their layout, their seals, and their checks. Pure functions that open no file. FORMAT.md
// describes the bytes for other programs.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/file.h"

namespace ballast::offload {

inline constexpr std::uint32_t format_version = 2;
inline constexpr std::size_t commit_bytes = 16 * block_bytes;
inline constexpr std::size_t label_bytes = 24;
inline constexpr std::size_t max_note_bytes = commit_bytes - 80 - label_bytes;

// The shape that the owner of the records chooses. Run and rank are part of every seal, so that a record of another run
// or rank is not accepted.
struct RecordShape {
  std::uint64_t run_id = 0;
  std::uint32_t rank = 0;
  std::size_t tiles = 0;
  std::size_t payload_bytes = 0;     // bytes of one tile's payload
  std::size_t first_bytes = 0;       // bytes of the first region, the parameter, which can be read alone
  std::uint64_t content_digest = 0;  // the digest of the owner's description of the payloads
  std::size_t places = 2;            // places of a tile; 1 only in scratch files, and then not in any file
};

// The name of a commit of a run, the same on all ranks. Each start of the run is an incarnation with a higher number
// than all earlier ones; commits are counted. So two histories that diverge after a crash never share a point.
struct CommitPoint {
  std::uint64_t incarnation = 0;  // 0 in records that belong to no run, or to none yet
  std::uint64_t number = 0;

  auto operator<=>(const CommitPoint&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// Three numbers of the owner that say what else belongs to a commit; zeros if nothing does. They can be read before any
// record; the note cannot.
using CommitLabel = std::array<std::uint64_t, 3>;
static_assert(sizeof(CommitLabel) == label_bytes);

// The offsets of records. Each tile has two places, for even and for odd generations; in scratch files it has one, for
// all. The tiles are dealt out to the files in turn.
//
//   file:    identity | commit slot 0 | commit slot 1 | tile, even | tile, odd | next tile, even | ...
//   record:  head, one block | payload | zeros up to a whole block
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
  std::size_t places_;  // places of a tile
  std::size_t files_;
  std::size_t record_bytes_;
  std::size_t first_record_bytes_;
};

// The seals of a tile's two regions. The store also keeps the expected seals in memory. So it finds a lost or misplaced
// write, which leaves an intact record that is not the expected one.
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

// Writes the head, and zeros after the payload. Returns the seals.
Seals seal_record(const RecordShape& shape, RecordName name, std::span<std::byte> record);

// The problem of a record's head, empty if there is none, and its seals.
struct HeadCheck {
  std::string problem{};
  Seals seals{};
};
HeadCheck check_head(const RecordShape& shape, RecordName name, std::span<const std::byte> head);

// Returns the problem of a record, empty if there is none. If only a part of the record was read, checks only the first
// region.
std::string check_record(const RecordShape& shape, RecordName name, const Seals& expected,
                         std::span<const std::byte> record);

// A record as it was written.
struct KnownRecord {
  RecordShape shape{};
  RecordName name{};
  Seals seals{};

  std::string text(const std::filesystem::path& file) const;  // names the file and the tile
  // Throws B3202 with file, tile and damage for other bytes.
  void require_intact(std::span<const std::byte> record, const std::filesystem::path& file) const;
};

struct Commit {
  std::uint64_t generation = 0;
  std::uint64_t step = 0;
  std::uint64_t seals_hash = 0;  // the hash of the seals of all tiles, in order
  CommitPoint point{};
  std::vector<std::byte> note{};
  CommitLabel label{};
};

void write_commit(const RecordShape& shape, const Commit& commit, std::span<std::byte> slot);
std::optional<Commit> read_commit(const RecordShape& shape,
                                  std::span<const std::byte> slot);  // empty if it is torn or foreign

std::uint64_t hash_of(std::span<const Seals> seals);

struct FileName {
  std::size_t file = 0;
  std::size_t files = 1;
};

// The content of a file's first block.
struct Identity {
  RecordShape shape{};
  FileName name{};
};

void write_identity(const RecordShape& shape, FileName name, std::span<std::byte> block);

// Throws B3202 for a damaged or foreign block, B1008 for a newer format, and B1010 for an older one.
Identity read_identity(std::span<const std::byte> block, const std::filesystem::path& path);

// Throws B1009 if the block belongs to another file of the run.
void check_name(const Identity& found, FileName name, const std::filesystem::path& path);

// Makes the checks of the two functions above, and throws B1009 for another run, rank or shape.
void check_identity(const RecordShape& shape, FileName name, std::span<const std::byte> block,
                    const std::filesystem::path& path);

}  // namespace ballast::offload

#include "offload/record_format.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/runtime/sizes.h"
#include "offload/checksum.h"

namespace ballast::offload {
namespace {

// "BLST" and the kind of block, in the byte order of a little-endian machine.
enum class Kind : std::uint32_t { identity = 0x31, record = 0x32, commit = 0x33 };
constexpr std::uint32_t magic = 0x54534c42;

// The beginning of every block. The seal covers all following bytes of the block.
struct BlockHead {
  std::uint64_t seal = 0;
  std::uint32_t magic = offload::magic;
  Kind kind{};
  std::uint32_t version = format_version;
  std::uint32_t rank = 0;
  std::uint64_t run_id = 0;
};

struct IdentityBlock {
  BlockHead head{.kind = Kind::identity};
  std::uint64_t file = 0;
  std::uint64_t files = 0;
  std::uint64_t tiles = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t first_bytes = 0;
  std::uint64_t content_digest = 0;
};

struct RecordBlock {
  BlockHead head{.kind = Kind::record};
  std::uint64_t tile = 0;
  std::uint64_t generation = 0;
  Seals seals{};
};

struct CommitBlock {
  BlockHead head{.kind = Kind::commit};
  std::uint64_t generation = 0;
  std::uint64_t step = 0;
  std::uint64_t seals_hash = 0;
  std::uint64_t note_bytes = 0;
  CommitPoint point{};
};
static_assert(sizeof(CommitBlock) + max_note_bytes + sizeof(CommitLabel) == commit_bytes);
constexpr std::size_t label_offset = commit_bytes - sizeof(CommitLabel);

std::uint64_t seal_of(std::span<const std::byte> block) { return checksum(block.subspan(sizeof(BlockHead::seal))); }

// Seals a block; the caller has filled the bytes after T.
template <class T>
void put(std::span<std::byte> block, T content, const RecordShape& shape) {
  content.head.run_id = shape.run_id;
  content.head.rank = shape.rank;
  std::memcpy(block.data(), &content, sizeof content);
  const std::uint64_t seal = seal_of(block);
  std::memcpy(block.data(), &seal, sizeof seal);
}

template <class T>
T get(std::span<const std::byte> block) {
  T content;
  std::memcpy(&content, block.data(), sizeof content);
  return content;
}

bool is_sealed(std::span<const std::byte> block, const BlockHead& head, Kind kind) {
  return head.magic == magic && head.kind == kind && head.seal == seal_of(block);
}

bool is_of(const RecordShape& shape, const BlockHead& head) {
  return head.run_id == shape.run_id && head.rank == shape.rank;
}

std::string owner(std::uint64_t run_id, std::uint64_t rank) {
  return fmt::format("rank {} of run {:#x}", rank, run_id);
}

// The seal of a region, valid only for this run, rank, tile, generation and region.
std::uint64_t region_seal(const RecordShape& shape, RecordName name, std::uint64_t region,
                          std::span<const std::byte> bytes) {
  const std::array<std::uint64_t, 5> identity{shape.run_id, shape.rank, name.tile, name.generation, region};
  return checksum(bytes, checksum(std::as_bytes(std::span(identity))));
}

Seals seals_of(const RecordShape& shape, RecordName name, std::span<const std::byte> payload) {
  return {region_seal(shape, name, 0, payload.first(shape.first_bytes)),
          region_seal(shape, name, 1, payload.subspan(shape.first_bytes))};
}

[[noreturn]] void refuse(Code code, const std::filesystem::path& path, std::string what) {
  fail(code, {.what = std::move(what), .where = path.string()});
}

}  // namespace

RecordPlaces::RecordPlaces(const RecordShape& shape, std::size_t files)
    : tiles_(shape.tiles),
      places_(shape.places),
      files_(files),
      record_bytes_(block_bytes + round_up(shape.payload_bytes, block_bytes)),
      first_record_bytes_(block_bytes + round_up(shape.first_bytes, block_bytes)) {}

std::uint64_t RecordPlaces::offset_of(std::size_t tile, std::uint64_t generation) const {
  return block_bytes + 2 * commit_bytes + (places_ * (tile / files_) + generation % places_) * record_bytes_;
}

std::uint64_t RecordPlaces::file_bytes(std::size_t file) const {
  const std::size_t tiles = tiles_ / files_ + (file < tiles_ % files_ ? 1 : 0);
  if (tiles == 0) return block_bytes;  // the identity alone is written
  return block_bytes + 2 * commit_bytes + places_ * tiles * record_bytes_;
}

std::span<std::byte> payload_of(const RecordShape& shape, std::span<std::byte> record) {
  return record.subspan(block_bytes, shape.payload_bytes);
}

Seals seal_record(const RecordShape& shape, RecordName name, std::span<std::byte> record) {
  const Seals seals = seals_of(shape, name, payload_of(shape, record));
  const auto padding = record.subspan(block_bytes + shape.payload_bytes);
  std::memset(record.data(), 0, block_bytes);
  std::memset(padding.data(), 0, padding.size());
  put(record.first(block_bytes), RecordBlock{.tile = name.tile, .generation = name.generation, .seals = seals}, shape);
  return seals;
}

HeadCheck check_head(const RecordShape& shape, RecordName name, std::span<const std::byte> head) {
  const auto found = get<RecordBlock>(head);
  if (!is_sealed(head, found.head, Kind::record)) return {"its head is damaged"};
  if (!is_of(shape, found.head)) {
    return {fmt::format("it belongs to {}, not to {}", owner(found.head.run_id, found.head.rank),
                        owner(shape.run_id, shape.rank))};
  }
  if (found.tile != name.tile) return {fmt::format("it is tile {}, written to the wrong place", found.tile)};
  if (found.generation != name.generation) {
    return {fmt::format("it is of generation {}, so a later write never reached the drive", found.generation)};
  }
  return {{}, found.seals};
}

std::string check_record(const RecordShape& shape, RecordName name, const Seals& expected,
                         std::span<const std::byte> record) {
  const HeadCheck head = check_head(shape, name, record.first(block_bytes));
  if (!head.problem.empty()) return head.problem;
  if (head.seals != expected) return "it is intact, but not the newest that was written";
  const auto first = record.subspan(block_bytes, shape.first_bytes);
  if (region_seal(shape, name, 0, first) != expected.first) return "its first region is damaged";
  if (record.size() < block_bytes + shape.payload_bytes) return {};
  const auto rest = record.subspan(block_bytes, shape.payload_bytes).subspan(shape.first_bytes);
  return region_seal(shape, name, 1, rest) == expected.rest ? "" : "its payload is damaged";
}

std::string KnownRecord::text(const std::filesystem::path& file) const {
  return fmt::format("{}, tile {}, generation {}", file.string(), name.tile, name.generation);
}

void KnownRecord::require_intact(std::span<const std::byte> record, const std::filesystem::path& file) const {
  const std::string problem = check_record(shape, name, seals, record);
  if (!problem.empty())
    fail(Code::bad_record, {.what = fmt::format("cannot use a record: {}", problem), .where = text(file)});
}

void write_commit(const RecordShape& shape, const Commit& commit, std::span<std::byte> slot) {
  std::memset(slot.data(), 0, slot.size());
  std::ranges::copy(commit.note, slot.begin() + sizeof(CommitBlock));
  std::memcpy(slot.data() + label_offset, &commit.label, sizeof commit.label);
  put(slot,
      CommitBlock{.generation = commit.generation,
                  .step = commit.step,
                  .seals_hash = commit.seals_hash,
                  .note_bytes = commit.note.size(),
                  .point = commit.point},
      shape);
}

std::optional<Commit> read_commit(const RecordShape& shape, std::span<const std::byte> slot) {
  const auto found = get<CommitBlock>(slot);
  if (!is_sealed(slot, found.head, Kind::commit) || !is_of(shape, found.head)) return {};
  if (found.note_bytes > max_note_bytes) return {};  // forged: a seal can be right
  const auto note = slot.subspan(sizeof found, found.note_bytes);
  return Commit{.generation = found.generation,
                .step = found.step,
                .seals_hash = found.seals_hash,
                .point = found.point,
                .note = {note.begin(), note.end()},
                .label = get<CommitLabel>(slot.subspan(label_offset))};
}

std::uint64_t hash_of(std::span<const Seals> seals) { return checksum(std::as_bytes(seals)); }

void write_identity(const RecordShape& shape, FileName name, std::span<std::byte> block) {
  std::memset(block.data(), 0, block.size());
  put(block,
      IdentityBlock{.file = name.file,
                    .files = name.files,
                    .tiles = shape.tiles,
                    .payload_bytes = shape.payload_bytes,
                    .first_bytes = shape.first_bytes,
                    .content_digest = shape.content_digest},
      shape);
}

// Checks the version before the seal, because another version may seal in another way.
Identity read_identity(std::span<const std::byte> block, const std::filesystem::path& path) {
  const auto found = get<IdentityBlock>(block);
  if (found.head.magic != magic)
    refuse(Code::bad_record, path, "cannot open the file: it is not a record file of Ballast");
  if (found.head.version != format_version) {
    const bool newer = found.head.version > format_version;
    fail(newer ? Code::newer_format : Code::older_format,
         {.what = fmt::format("cannot open the record file: it has {} format than this version of Ballast reads",
                              newer ? "a newer" : "an older"),
          .where = path.string(),
          .needed = fmt::format("format {}", newer ? found.head.version : format_version),
          .available = fmt::format("format {}", newer ? format_version : found.head.version)});
  }
  if (!is_sealed(block, found.head, Kind::identity))
    refuse(Code::bad_record, path, "cannot open the record file: its first block is damaged");
  return {.shape = {.run_id = found.head.run_id,
                    .rank = found.head.rank,
                    .tiles = found.tiles,
                    .payload_bytes = found.payload_bytes,
                    .first_bytes = found.first_bytes,
                    .content_digest = found.content_digest},
          .name = {.file = found.file, .files = found.files}};
}

void check_name(const Identity& found, FileName name, const std::filesystem::path& path) {
  if (found.name.file == name.file && found.name.files == name.files) return;
  refuse(Code::run_mismatch, path,
         fmt::format("cannot open the record file: it is file {} of {}, not file {} of {}: are directories swapped?",
                     found.name.file + 1, found.name.files, name.file + 1, name.files));
}

void check_identity(const RecordShape& shape, FileName name, std::span<const std::byte> block,
                    const std::filesystem::path& path) {
  const Identity found = read_identity(block, path);
  const auto require_own = [&](bool is_own, auto&& what) {
    if (!is_own) refuse(Code::run_mismatch, path, what());
  };
  require_own(found.shape.run_id == shape.run_id && found.shape.rank == shape.rank, [&] {
    return fmt::format("cannot open the record file: it belongs to {}, not to {}",
                       owner(found.shape.run_id, found.shape.rank), owner(shape.run_id, shape.rank));
  });
  check_name(found, name, path);
  require_own(found.shape.tiles == shape.tiles && found.shape.payload_bytes == shape.payload_bytes &&
                  found.shape.first_bytes == shape.first_bytes,
              [&] {
                return fmt::format(
                    "cannot open the record file: it has {} tiles of {} bytes (first region {}), not {} of {} ({})",
                    found.shape.tiles, found.shape.payload_bytes, found.shape.first_bytes, shape.tiles,
                    shape.payload_bytes, shape.first_bytes);
              });
  require_own(found.shape.content_digest == shape.content_digest,
              [] { return "cannot open the record file: its tiles hold other data than expected"; });
}

}  // namespace ballast::offload

#include "offload/record_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/runtime/error.h"

namespace ballast::offload {
namespace {

constexpr std::uint64_t magic = 0x315453414c4c4142;  // "BALLAST1"
constexpr std::size_t commit_slot_bytes = 4096;      // two of them at the start; a commit writes the older one
constexpr std::size_t records_begin = 2 * commit_slot_bytes;

struct CommitRecord {
  std::uint64_t magic;
  std::uint64_t run_id;
  std::uint64_t tiles;
  std::uint64_t payload_bytes;
  std::uint64_t generation;
  std::uint64_t checksum;  // of the fields above
};

struct RecordHeader {
  std::uint64_t magic;
  std::uint64_t tile;
  std::uint64_t generation;
  std::uint64_t checksum;  // of the payload, seeded with run, tile and generation
};

CommitRecord commit_record(const RecordShape& shape, std::uint64_t generation) {
  CommitRecord record{magic, shape.run_id, shape.tiles, shape.payload_bytes, generation, 0};
  record.checksum = XXH3_64bits(&record, offsetof(CommitRecord, checksum));
  return record;
}

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

RecordFile::RecordFile(const std::filesystem::path& path, const RecordShape& shape, int flags)
    : shape_(shape), file_(path, flags), written_(shape.tiles) {}

RecordFile RecordFile::create(const std::filesystem::path& path, const RecordShape& shape) {
  RecordFile records(path, shape, O_RDWR | O_CREAT | O_EXCL);
  const std::vector<std::byte> zeros(shape.payload_bytes);
  for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
    records.write(tile, zeros);
  }
  records.commit();
  return records;
}

RecordFile RecordFile::open(const std::filesystem::path& path, const RecordShape& shape) {
  RecordFile records(path, shape, O_RDWR);
  for (std::uint64_t slot = 0; slot < 2; ++slot) {
    CommitRecord found{};
    records.file_.read(slot * commit_slot_bytes, bytes_of(found));
    CommitRecord expected = commit_record(shape, found.generation);
    if (std::ranges::equal(bytes_of(found), bytes_of(expected))) {
      records.generation_ = std::max(records.generation_, found.generation);
    }
  }
  require(records.generation_ > 0, Code::bad_record, [&] {
    return Problem{.what = "the file holds no committed generation of this run and shape", .where = path.string()};
  });
  return records;
}

std::uint64_t RecordFile::place(std::size_t tile, std::uint64_t generation) const {
  return records_begin + (2 * tile + generation % 2) * (sizeof(RecordHeader) + shape_.payload_bytes);
}

std::uint64_t RecordFile::checksum(std::size_t tile, std::uint64_t generation,
                                   std::span<const std::byte> payload) const {
  const std::array<std::uint64_t, 3> identity{shape_.run_id, tile, generation};
  return XXH3_64bits_withSeed(payload.data(), payload.size(), XXH3_64bits(identity.data(), sizeof(identity)));
}

// Bytes past a record's end would be the next record's.
void RecordFile::check(std::size_t tile, std::size_t payload_bytes) const {
  require(tile < shape_.tiles && payload_bytes == shape_.payload_bytes, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("tile {} was to be read or written with {} bytes", tile, payload_bytes),
                   .where = file_.path().string(),
                   .needed = fmt::format("one of {} tiles of {} bytes", shape_.tiles, shape_.payload_bytes)};
  });
}

void RecordFile::read(std::size_t tile, std::span<std::byte> payload) const {
  check(tile, payload.size());
  const std::uint64_t at = place(tile, generation_);
  RecordHeader header{};
  file_.read(at, bytes_of(header));
  file_.read(at + sizeof(header), payload);
  const bool intact = header.magic == magic && header.tile == tile && header.generation == generation_ &&
                      header.checksum == checksum(tile, generation_, payload);
  require(intact, Code::bad_record, [&] {
    return Problem{.what = "a record is not what was written",
                   .where = fmt::format("{}, tile {}, generation {}", file_.path().string(), tile, generation_)};
  });
}

void RecordFile::write(std::size_t tile, std::span<const std::byte> payload) {
  check(tile, payload.size());
  require_known_state();
  const std::uint64_t next = generation_ + 1;
  RecordHeader header{magic, tile, next, checksum(tile, next, payload)};
  file_.write(place(tile, next), bytes_of(header));
  file_.write(place(tile, next) + sizeof(header), payload);
  written_[tile] = true;
}

// The records reach the drive before the commit record is written, and that one before this returns: at any moment in
// between, one of the two commit slots names a generation of which everything is there.
void RecordFile::commit() {
  require(std::ranges::all_of(written_, [](bool written) { return written; }), Code::internal, [&] {
    return Problem{.what = "a generation was committed before all of its tiles were written",
                   .where = file_.path().string()};
  });
  require_known_state();
  commit_failed_ = true;  // until it has not
  file_.flush();
  CommitRecord record = commit_record(shape_, generation_ + 1);
  file_.write(record.generation % 2 * commit_slot_bytes, bytes_of(record));
  file_.flush();
  commit_failed_ = false;
  generation_ = record.generation;
  written_.assign(shape_.tiles, false);
}

// A failed flush is final. The drive may hold the new generation as the current one, and writing another over it, in the
// places that this object takes for free, would mix the two.
void RecordFile::require_known_state() const {
  require(!commit_failed_, Code::file_call, [&] {
    return Problem{.what = "a commit has failed before: which generation the drive holds is not known",
                   .where = file_.path().string(),
                   .remedy = "open the file again: that finds its newest committed generation"};
  });
}

}  // namespace ballast::offload

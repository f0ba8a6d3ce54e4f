#include "offload/chunk_file.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>

#include "kernels/runtime/sizes.h"
#include "offload/checksum.h"

namespace ballast::offload {
namespace {

constexpr std::size_t max_slots = 16;  // the usual depth of a queue

// Direct I/O moves whole blocks.
Chunk in_blocks(const Chunk& chunk) {
  const std::uint64_t begin = chunk.offset / block_bytes * block_bytes;
  return {begin, round_up(static_cast<std::size_t>(chunk.offset + chunk.bytes), block_bytes) - begin, 0};
}

std::size_t largest(const std::vector<ChunkPlace>& places) {
  std::size_t bytes = block_bytes;
  for (const ChunkPlace& place : places) {
    bytes = std::max<std::size_t>(bytes, in_blocks(place.chunk).bytes);
  }
  return bytes;
}

}  // namespace

ChunkWriter::ChunkWriter(const std::filesystem::path& path, IoQueue& queue, const Memory& memory)
    : memory_(memory),
      pages_(map_host_pages(memory.buffers * memory.buffer_bytes, "a checkpoint that is being written")),
      file_(path, {.create = true, .allow_network = true}),
      queue_(queue),
      written_(memory.buffers) {}

ChunkWriter::~ChunkWriter() { settle(written_); }

Chunk ChunkWriter::append(std::span<const std::byte> bytes) {
  const Chunk chunk{begin_ + filled_, bytes.size(), checksum(bytes)};
  copy(bytes);
  constexpr std::byte nothing[chunk_alignment]{};
  copy(std::span(nothing).first(round_up(bytes.size(), chunk_alignment) - bytes.size()));
  return chunk;
}

void ChunkWriter::copy(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::span<std::byte> room = buffer(now_).subspan(filled_);
    const std::size_t count = std::min(room.size(), bytes.size());
    std::memcpy(room.data(), bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ == memory_.buffer_bytes) write_buffer();
  }
}

void ChunkWriter::write_buffer() {
  written_[now_] = queue_.submit({IoKind::write, &file_, begin_, buffer(now_).first(filled_)});
  begin_ += filled_;
  filled_ = 0;
  now_ = (now_ + 1) % memory_.buffers;
  written_[now_].wait();
}

// Fills the last block with zeros.
void ChunkWriter::write_blocks() {
  const std::size_t blocks = round_up(filled_, block_bytes);
  std::memset(buffer(now_).data() + filled_, 0, blocks - filled_);
  filled_ = blocks;
  if (filled_ > 0) write_buffer();
}

std::optional<ChunkPlace> ChunkWriter::clone(const OpenRecord& record) {
  write_blocks();
  const Chunk from = in_blocks(record.place.chunk);
  file_clone_range range{
      .src_fd = record.file.descriptor(), .src_offset = from.offset, .src_length = from.bytes, .dest_offset = begin_};
  if (::ioctl(file_.descriptor(), FICLONERANGE, &range) != 0) return {};
  ChunkPlace place = record.place;
  place.chunk.offset = std::exchange(begin_, begin_ + from.bytes);
  return place;
}

std::uint64_t ChunkWriter::finish() {
  write_blocks();
  for (const Completion& write : written_) {
    write.wait();
  }
  queue_.submit({IoKind::flush, &file_, 0, {}}).wait();
  return begin_;
}

ChunkReader::ChunkReader(const std::vector<std::filesystem::path>& files, std::vector<ChunkPlace> in_order,
                         IoQueue& queue, std::size_t memory_bytes)
    : in_order_(std::move(in_order)), queue_(queue), slot_bytes_(largest(in_order_)) {
  slots_ = std::clamp<std::size_t>(memory_bytes / slot_bytes_, 2, max_slots);
  files_.resize(files.size());
  for (const ChunkPlace& place : in_order_) {
    auto& file = files_.at(place.file);
    if (!file) file = std::make_unique<File>(files[place.file], FileOptions{.allow_network = true, .writable = false});
  }
  require_whole();
  pages_ = map_host_pages(slots_ * slot_bytes_, "a checkpoint that is being read");
  read_.resize(slots_);
  read_ahead();
}

ChunkReader::~ChunkReader() { settle(read_); }

void ChunkReader::require_whole() const {
  std::vector<std::uint64_t> needed(files_.size());
  for (const ChunkPlace& place : in_order_) {
    const Chunk blocks = in_blocks(place.chunk);
    needed.at(place.file) = std::max(needed.at(place.file), blocks.offset + blocks.bytes);
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    require(!files_[i] || files_[i]->bytes() >= needed[i], Code::bad_record, [&] {
      return Problem{.what = "the file is cut off",
                     .where = files_[i]->path().string(),
                     .needed = fmt::format("{} bytes", needed[i]),
                     .available = fmt::format("{} bytes", files_[i]->bytes())};
    });
  }
}

std::span<std::byte> ChunkReader::slot(std::size_t number) const {
  return {pages_.get() + number % slots_ * slot_bytes_, slot_bytes_};
}

// The slot of the chunk that the caller still uses is not overwritten.
void ChunkReader::read_ahead() {
  const std::size_t end = std::min(in_order_.size(), given_ + (given_ == 0 ? slots_ : slots_ - 1));
  for (; begun_ < end; ++begun_) {
    const ChunkPlace& place = in_order_[begun_];
    const Chunk blocks = in_blocks(place.chunk);
    read_[begun_ % slots_] =
        queue_.submit({IoKind::read, files_[place.file].get(), blocks.offset, slot(begun_).first(blocks.bytes)});
  }
}

std::span<const std::byte> ChunkReader::next() {
  require(given_ < in_order_.size(), Code::internal,
          [] { return Problem{.what = "cannot read another chunk: all announced chunks have been read"}; });
  const std::size_t number = given_++;
  read_ahead();
  const ChunkPlace& place = in_order_[number];
  const Chunk& chunk = place.chunk;
  read_[number % slots_].wait();
  const auto bytes = slot(number).subspan(chunk.offset - in_blocks(chunk).offset, chunk.bytes);
  if (place.record) {
    place.record->require_intact(bytes, files_[place.file]->path());
    return payload_of(place.record->shape, bytes);
  }
  require(checksum(bytes) == chunk.seal, Code::bad_record, [&] {
    return Problem{.what = "cannot use a chunk: its bytes differ from those that were written",
                   .where = fmt::format("{}, bytes {} to {}", files_[place.file]->path().string(), chunk.offset,
                                        chunk.offset + chunk.bytes)};
  });
  return bytes;
}

}  // namespace ballast::offload

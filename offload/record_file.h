// Tiles of bytes on a drive, never half new: each tile has two places, a step writes the one it did not read, and a small
// commit makes the whole generation current. This is the plain form: one file, blocking calls.
#pragma once

#include <vector>

#include "offload/file.h"

namespace ballast::offload {

struct RecordShape {
  std::uint64_t run_id = 0;  // seeds the checksums, so that a record of another run is not taken for ours
  std::size_t tiles = 0;
  std::size_t payload_bytes = 0;
};

// Used by one thread at a time.
class RecordFile {
 public:
  // Makes the file with every payload zero, as generation 1. An existing file is not touched.
  static RecordFile create(const std::filesystem::path& path, const RecordShape& shape);
  // Opens the newest committed generation.
  static RecordFile open(const std::filesystem::path& path, const RecordShape& shape);

  std::uint64_t generation() const { return generation_; }

  void read(std::size_t tile, std::span<std::byte> payload) const;   // of the current generation
  void write(std::size_t tile, std::span<const std::byte> payload);  // for the next one
  void commit();  // once every tile is written: the next generation becomes the current one

 private:
  RecordFile(const std::filesystem::path& path, const RecordShape& shape, int flags);

  void check(std::size_t tile, std::size_t payload_bytes) const;
  void require_known_state() const;
  std::uint64_t place(std::size_t tile, std::uint64_t generation) const;
  std::uint64_t checksum(std::size_t tile, std::uint64_t generation, std::span<const std::byte> payload) const;

  RecordShape shape_;
  File file_;
  std::uint64_t generation_ = 0;
  std::vector<bool> written_;
  bool commit_failed_ = false;
};

}  // namespace ballast::offload

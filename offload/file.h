// An open file: whole reads and writes at an offset, or an error that names operation, file, offset and cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace ballast::offload {

// Closed by its owner's end. Reads and writes may come from several threads.
class File {
 public:
  File(const std::filesystem::path& path, int flags);  // as open(2); a new file is readable by its user only
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::filesystem::path& path() const { return path_; }
  void read(std::uint64_t offset, std::span<std::byte> into) const;
  void write(std::uint64_t offset, std::span<const std::byte> from) const;
  void flush() const;  // returns when everything written is on the drive

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace ballast::offload

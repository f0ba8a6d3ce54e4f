// Reads bytes as the blocks of a record file.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "offload/checksum.h"
#include "offload/record_format.h"
#include "tests/fuzz/mutants.h"

namespace ballast::testing {

// `block` with the seal that belongs to its bytes: a forged block has it too.
inline std::vector<std::byte> sealed(std::vector<std::byte> block, std::size_t bytes) {
  block.resize(bytes);
  const std::uint64_t seal = offload::checksum(std::span<const std::byte>(block).subspan(sizeof(std::uint64_t)));
  std::memcpy(block.data(), &seal, sizeof seal);
  return block;
}

// The blocks of a record file. `shape` is the one that the file should have.
inline void read_as_record(const std::vector<std::byte>& bytes, const offload::RecordShape& shape) {
  const auto commit = sealed(bytes, offload::commit_bytes);
  if (const auto found = offload::read_commit(shape, commit)) {
    require_holds(found->note.size() <= offload::max_note_bytes, "the note lies in the commit");
    offload::checksum(found->note);
  }
  const auto block = sealed(bytes, offload::block_bytes);
  may_refuse([&] { offload::read_identity(block, "state.records"); });
  may_refuse([&] { offload::check_identity(shape, {}, block, "state.records"); });
  offload::check_head(shape, {}, block);
}

}  // namespace ballast::testing

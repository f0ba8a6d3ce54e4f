#include "offload/activation_store.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/runtime/sizes.h"
#include "offload/checksum.h"
#include "offload/preflight.h"

namespace ballast::offload {

namespace {

constexpr std::size_t least_buffers = 16;  // buffers of a slab; large ones are slow to pin, and many are slower
constexpr std::size_t growth = 4;          // a slab adds at least this part of what is there

constexpr std::size_t most_requests = 64;     // reads and writes in flight together
constexpr std::size_t most_reads_ahead = 16;  // more would only make the first one later

std::unique_ptr<IoQueue> queue_for(const ActivationOptions& options, std::unique_ptr<IoQueue> given) {
  if (given != nullptr || options.directory.empty()) return given;
  return open_queue({.depth = std::min(options.buffers(), most_requests), .log = options.log});
}

// Later work in `stream` begins after the work that is in the trainer's stream now.
void follow(const Stream& stream, StreamHandle trainer) {
  const Event now(stream.gpu());
  now.record(Stream::wrap(trainer, stream.gpu()));
  stream.wait_for(now);
}

Completion mark(const Stream& stream) {
  auto event = std::make_shared<Event>(stream.gpu());
  event->record(stream);
  return Completion(std::move(event));
}

// Copies of a GPU's memory, piece by piece. Pieces that are neighbours in both memories are one copy: a link needs large ones.
class JoinedCopies {
 public:
  explicit JoinedCopies(const Stream& stream) : stream_(stream) {}

  void add(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to_ + bytes_ != to || from_ + bytes_ != from) {
      copy(to_, from_, bytes_, stream_);
      to_ = to, from_ = from, bytes_ = 0;
    }
    bytes_ += bytes;
  }

  Completion end() {  // the completion of all copies
    copy(to_, from_, std::exchange(bytes_, 0), stream_);
    return mark(stream_);
  }

 private:
  const Stream& stream_;
  std::byte* to_ = nullptr;
  const std::byte* from_ = nullptr;
  std::size_t bytes_ = 0;
};

[[noreturn]] void fail_transfer(const Error& error, std::string_view what) {
  Problem problem = error.problem();
  problem.what = fmt::format("cannot {} activations: {}", what, problem.what);
  if (error.code() == Code::drive_full) {
    problem.remedy =
        "Free space on the drive, name another directory, or keep fewer activations: smaller micro-batches, or activation "
        "checkpointing.";
  }
  fail(error.code(), problem);
}

}  // namespace

bool PieceBuffer::is_idle() const {
  return std::ranges::all_of(uses, [](const Completion& use) { return use.is_done(); });
}

PieceBuffers::~PieceBuffers() {
  for (const PieceBuffer& buffer : buffers_) {
    settle(buffer.uses);
  }
  if (queue_ == nullptr) return;
  for (const Buffer& slab : slabs_) {
    queue_->forget({slab.data(), slab.bytes()});
  }
}

// The buffer that was given back last is the likeliest one to be in the caches.
PieceBuffer* PieceBuffers::take() {
  auto found = std::find_if(free_.rbegin(), free_.rend(), [](const PieceBuffer* buffer) { return buffer->is_idle(); });
  if (found == free_.rend()) {
    if (buffers_.size() >= options_.buffers()) return nullptr;
    add_slab();
    found = free_.rbegin();
  }
  PieceBuffer* const taken = *found;
  free_.erase(std::next(found).base());
  taken->uses.clear();
  return taken;
}

PieceBuffer* PieceBuffers::take_used() {
  if (free_.empty()) return nullptr;
  PieceBuffer* const taken = free_.front();
  free_.pop_front();
  return taken;
}

void PieceBuffers::add_slab() {
  const std::size_t wanted = std::max(least_buffers, buffers_.size() / growth);
  const std::size_t count = std::min(wanted, options_.buffers() - buffers_.size());
  const bool pinned = options_.gpu.has_value();
  slabs_.push_back(allocate(accounts_, {.kind = pinned ? MemoryKind::pinned : MemoryKind::pageable,
                                        .bytes = count * options_.piece_bytes,
                                        .owner = "offloaded activations",
                                        .gpu = options_.gpu.value_or(0),
                                        .threads = 0}));
  const std::span<std::byte> memory{slabs_.back().data(), slabs_.back().bytes()};
  if (queue_ != nullptr) queue_->remember(memory);
  for (std::size_t i = count; i-- > 0;) {  // take() begins at the end: neighbours then hold neighbouring bytes
    free_.push_back(
        &buffers_.emplace_back(PieceBuffer{.memory = memory.subspan(i * options_.piece_bytes, options_.piece_bytes)}));
  }
}

std::size_t ActivationOptions::buffers() const {
  return directory.empty() ? SIZE_MAX : std::max<std::size_t>(2, memory_bytes / piece_bytes);
}

ActivationStore::ActivationStore(const ActivationOptions& options, std::unique_ptr<IoQueue> queue)
    : options_(options), queue_(queue_for(options, std::move(queue))), buffers_(options_, queue_.get()) {
  if (options.gpu) {
    download_.emplace(*options.gpu);
    upload_.emplace(*options.gpu);
  }
  if (!options.directory.empty()) file_.emplace(File::nameless(options.directory));
}

// --- Saving ---

ActivationStore::Saved ActivationStore::save(std::span<const std::byte> bytes, StreamHandle stream) {
  require(!bytes.empty(), Code::bad_argument,
          [] { return Problem{.what = "cannot save an activation of 0 bytes", .needed = "at least one byte"}; });
  const std::lock_guard lock(mutex_);
  const Ticket ticket = next_;
  if (download_) follow(*download_, stream);
  Completion copied;
  try {
    save_pieces(bytes);
    if (download_) copied = file_ ? mark(*download_) : keep_in_memory(ticket, bytes);
  } catch (...) {
    forget(ticket, next_ - ticket);
    if (download_) download_->synchronize();  // the caller frees the bytes now
    throw;
  }
  entries_[ticket] = {bytes.size(), next_ - ticket};
  counters_.saved_bytes += bytes.size();
  counters_.kept_bytes += bytes.size();
  return {ticket, copied};
}

// Copies the bytes of a GPU to the buffers of their pieces.
Completion ActivationStore::keep_in_memory(Ticket ticket, std::span<const std::byte> bytes) {
  JoinedCopies copies(*download_);
  for (Order order = ticket; order < next_; ++order) {
    const Piece& piece = pieces_.at(order);
    copies.add(piece.buffer->memory.data(), bytes.data() + (order - ticket) * options_.piece_bytes, piece.bytes);
  }
  Completion copied = copies.end();
  for (Order order = ticket; order < next_; ++order) {
    Piece& piece = pieces_.at(order);
    piece.entered = copied;
    piece.buffer->uses.push_back(copied);
  }
  return copied;
}

// Gives each piece a buffer, and its bytes, but for those of a GPU that no drive takes.
void ActivationStore::save_pieces(std::span<const std::byte> bytes) {
  for (std::size_t begin = 0; begin < bytes.size(); begin += options_.piece_bytes) {
    PieceBuffer& buffer = empty_buffer();
    const Order order = next_++;
    Piece& piece = pieces_[order];
    piece.bytes = std::min(options_.piece_bytes, bytes.size() - begin);
    piece.buffer = &buffer;
    held_.insert(order);
    if (file_ || !download_) enter(piece, bytes.data() + begin);
    if (file_) to_write_.push_back(order);
    begin_writes();
  }
}

void ActivationStore::enter(Piece& piece, const std::byte* from) {
  std::byte* const to = piece.buffer->memory.data();
  if (!download_) {
    std::memcpy(to, from, piece.bytes);
    return;
  }
  copy(to, from, piece.bytes, *download_);
  piece.entered = mark(*download_);
  piece.buffer->uses.push_back(piece.entered);
}

// Begins the writes of pieces that have entered their buffers, in the order of saving.
void ActivationStore::begin_writes() {
  for (; !to_write_.empty(); to_write_.pop_front()) {
    const auto found = pieces_.find(to_write_.front());
    if (found == pieces_.end() || found->second.place) continue;  // dropped, or written because its buffer was needed
    if (!found->second.entered.is_done()) return;
    begin_write(found->first, found->second);
  }
}

void ActivationStore::begin_write(Order order, Piece& piece) {
  const std::span<std::byte> memory = piece.buffer->memory;
  piece.seal = checksum(memory.first(piece.bytes), order);
  const std::uint64_t place = take_place();
  const std::span<std::byte> blocks = memory.first(round_up(piece.bytes, block_bytes));
  piece.written = queue_->submit({IoKind::write, &*file_, place, blocks});
  piece.place = place;
  piece.buffer->uses.push_back(piece.written);
  counters_.written_bytes += blocks.size();
}

// Throws B2202 if the file would exceed the limit of this process.
std::uint64_t ActivationStore::take_place() {
  if (!free_places_.empty() && free_places_.front().last_write.is_done()) {
    const std::uint64_t offset = free_places_.front().offset;
    free_places_.pop_front();
    return offset;
  }
  require_allowed(file_bytes_ + options_.piece_bytes, options_.directory);
  return std::exchange(file_bytes_, file_bytes_ + options_.piece_bytes);
}

// --- Loading ---

Completion ActivationStore::load(Ticket ticket, std::span<std::byte> into, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const Entry& entry = entry_of(ticket);
  require(into.size() == entry.bytes, Code::wrong_size, [&] {
    return Problem{.what = "cannot load an activation: the memory for it has another size",
                   .needed = fmt::format("{} bytes", entry.bytes),
                   .available = fmt::format("{} bytes", into.size())};
  });
  if (upload_) follow(*upload_, stream);
  Completion copied;
  try {
    if (upload_ && !file_) {
      copied = leave_memory(ticket, into);
    } else {
      for (std::size_t i = entry.pieces; i-- > 0;)  // the last piece was saved last
        copied = leave(ticket + i, into.data() + i * options_.piece_bytes);
    }
  } catch (...) {
    if (upload_) upload_->synchronize();  // the caller frees the memory now
    throw;
  }
  counters_.loaded_bytes += entry.bytes;
  return copied;
}

// Copies to a GPU what host memory keeps.
Completion ActivationStore::leave_memory(Ticket ticket, std::span<std::byte> into) {
  pieces_.at(ticket).entered.order(*upload_);  // that of all pieces
  JoinedCopies copies(*upload_);
  for (std::size_t begin = 0; begin < into.size(); begin += options_.piece_bytes) {
    const Piece& piece = pieces_.at(ticket + begin / options_.piece_bytes);
    copies.add(into.data() + begin, piece.buffer->memory.data(), piece.bytes);
  }
  Completion left = copies.end();
  for (std::size_t i = 0; i < entries_.at(ticket).pieces; ++i)
    pieces_.at(ticket + i).buffer->uses.push_back(left);
  return left;
}

Completion ActivationStore::leave(Order order, std::byte* to) {
  Piece& piece = pieces_.at(order);
  if (piece.buffer == nullptr) begin_read(order, piece, empty_buffer());
  used_.erase(order);
  held_.insert(order);  // nothing may take its buffer now
  read_ahead(order);
  Completion left;
  if (upload_ && !piece.was_read) {
    piece.entered.order(*upload_);  // a copy of the GPU, which waits for it there
  } else {
    check(order, piece);
  }
  if (upload_) {
    copy(to, piece.buffer->memory.data(), piece.bytes, *upload_);
    left = mark(*upload_);
    piece.buffer->uses.push_back(left);
  } else {
    std::memcpy(to, piece.buffer->memory.data(), piece.bytes);
  }
  held_.erase(order);
  used_.insert(order);
  return left;
}

void ActivationStore::begin_read(Order order, Piece& piece, PieceBuffer& buffer) {
  const std::span<std::byte> blocks = buffer.memory.first(round_up(piece.bytes, block_bytes));
  piece.buffer = &buffer;
  held_.insert(order);
  piece.entered = queue_->submit({IoKind::read, &*file_, *piece.place, blocks});
  piece.was_read = true;
  buffer.uses.push_back(piece.entered);
  reading_.push_back(piece.entered);
  counters_.read_bytes += blocks.size();
}

// The backward pass loads pieces in reverse order. Pieces that have been loaded leave their buffers first, then those
// that were saved before the piece that is read.
void ActivationStore::read_ahead(Order below) {
  if (!file_) return;
  for (auto at = pieces_.lower_bound(below); at != pieces_.begin() && may_read_more();) {
    --at;
    if (at->second.buffer != nullptr) continue;
    PieceBuffer* const buffer = empty_buffer_for(at->first);
    if (buffer == nullptr) return;
    begin_read(at->first, at->second, *buffer);
  }
}

bool ActivationStore::may_read_more() {
  while (!reading_.empty() && reading_.front().is_done()) {
    reading_.pop_front();
  }
  return reading_.size() < most_reads_ahead;
}

// Waits until the bytes are in the buffer. After a failure the next load reads them again.
void ActivationStore::check(Order order, Piece& piece) {
  try {
    wait(piece.entered, "read");
    const auto bytes = piece.buffer->memory.first(piece.bytes);
    require(!piece.was_read || checksum(bytes, order) == piece.seal, Code::bad_record, [&] {
      return Problem{.what = "cannot use an activation: its bytes differ from those that were written",
                     .where = fmt::format("{}, byte {}", file_->path().string(), *piece.place),
                     .remedy = "No gradient has used them. Repeat the step from its beginning, and check the drive."};
    });
    piece.was_read = false;
  } catch (...) {
    if (piece.was_read) release(order, piece);
    throw;
  }
}

bool ActivationStore::is_in_memory(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  const std::size_t pieces = entry_of(ticket).pieces;
  for (Order order = ticket; order < ticket + pieces; ++order) {
    const Piece& piece = pieces_.at(order);
    if (piece.buffer == nullptr || (piece.was_read && !piece.entered.is_done())) return false;
  }
  return true;
}

// --- Buffers ---

PieceBuffer& ActivationStore::empty_buffer() {
  if (PieceBuffer* const idle = buffers_.take()) return *idle;
  PieceBuffer* buffer = buffers_.take_used();
  if (buffer == nullptr) {
    const Order first = *first_to_leave();
    empty(first, pieces_.at(first));
    buffer = buffers_.take_used();
  }
  const auto begin = std::chrono::steady_clock::now();
  settle(buffer->uses);
  counters_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  buffer->uses.clear();
  return *buffer;
}

// Waits for nothing. Returns null if all buffers hold pieces that are needed before this one, or that are in use.
PieceBuffer* ActivationStore::empty_buffer_for(Order order) {
  if (PieceBuffer* const idle = buffers_.take()) return idle;
  const std::optional<Order> first = first_to_leave();
  if (!first || (used_.empty() && *first > order)) return nullptr;
  Piece& piece = pieces_.at(*first);
  if (!piece.place || !piece.written.is_done()) return nullptr;
  empty(*first, piece);
  return buffers_.take();
}

std::optional<ActivationStore::Order> ActivationStore::first_to_leave() const {
  const std::set<Order>& orders = used_.empty() ? held_ : used_;
  return orders.empty() ? std::nullopt : std::optional(*orders.begin());
}

// Lets a piece leave its buffer after its write. After a failed write it stays, and the next attempt throws again.
void ActivationStore::empty(Order order, Piece& piece) {
  if (!piece.place) {
    wait(piece.entered, "copy");
    begin_write(order, piece);
  }
  wait(piece.written, "write");
  release(order, piece);
}

void ActivationStore::release(Order order, Piece& piece) {
  held_.erase(order);
  used_.erase(order);
  piece.was_read = false;
  buffers_.give_back(*std::exchange(piece.buffer, nullptr));
}

void ActivationStore::wait(const Completion& completion, std::string_view what) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    wait_watched(completion, options_.log,
                 [&] { return fmt::format("a {} of activations in {}", what, options_.directory.string()); });
  } catch (const Error& error) {
    fail_transfer(error, what);
  }
  counters_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// --- The end of an activation ---

void ActivationStore::drop(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const Entry entry = entry_of(ticket);
  entries_.erase(ticket);
  counters_.kept_bytes -= entry.bytes;
  forget(ticket, entry.pieces);
}

void ActivationStore::forget(Ticket ticket, std::size_t pieces) {
  for (Order order = ticket + pieces; order-- > ticket;) {  // the first one is taken first again
    Piece& piece = pieces_.at(order);
    if (piece.place) free_places_.push_back({*piece.place, piece.written});
    if (piece.buffer != nullptr) release(order, piece);
    pieces_.erase(order);
  }
}

const ActivationStore::Entry& ActivationStore::entry_of(Ticket ticket) const {
  const auto found = entries_.find(ticket);
  require(found != entries_.end(), Code::internal,
          [&] { return Problem{.what = fmt::format("cannot use activation {}: it is not kept", ticket)}; });
  return found->second;
}

ActivationStore::Counters ActivationStore::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.host_bytes = buffers_.bytes();
  counters.drive_bytes = file_bytes_;
  return counters;
}

}  // namespace ballast::offload

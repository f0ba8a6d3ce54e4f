#include "tests/offload/faulty_calls.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "kernels/runtime/host_pages.h"

namespace ballast::offload {

void FaultyCalls::plan(IoKind kind, std::deque<Fault> faults) {
  const std::lock_guard lock(mutex_);
  planned_[kind] = std::move(faults);
}

void FaultyCalls::plan_error(IoKind kind, int error, std::size_t times) {
  plan(kind, std::deque<Fault>(times, Fault{.what = Fault::What::error, .error = error}));
}

void FaultyCalls::disturb(unsigned seed) {
  const std::lock_guard lock(mutex_);
  random_.seed(seed);
  disturbing_ = true;
}

std::size_t FaultyCalls::calls(IoKind kind) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(kind);
  return found == calls_.end() ? 0 : found->second;
}

std::size_t FaultyCalls::left(IoKind kind) const {
  const std::lock_guard lock(mutex_);
  const auto found = planned_.find(kind);
  return found == planned_.end() ? 0 : found->second.size();
}

bool FaultyCalls::next_fault(IoKind kind, Fault& fault) {
  const std::lock_guard lock(mutex_);
  ++calls_[kind];
  auto& planned = planned_[kind];
  if (!planned.empty()) {
    fault = planned.front();
    planned.pop_front();
    return true;
  }
  if (!disturbing_) return false;
  switch (random_() % 6) {
    case 0: fault = {.what = Fault::What::error, .error = EINTR}; return true;
    case 1: fault = {.what = Fault::What::error, .error = EAGAIN}; return true;
    case 2: fault = {.what = Fault::What::short_transfer, .amount = (1 + random_() % 3) * block_bytes}; return true;
    case 3: fault = {.what = Fault::What::delay, .amount = random_() % 3}; return true;
    default: return false;
  }
}

std::int64_t FaultyCalls::operator()(const IoRequest& request) {
  Fault fault;
  if (!next_fault(request.kind, fault)) return system_call(request);
  IoRequest changed = request;
  switch (fault.what) {
    case Fault::What::error: return -fault.error;
    case Fault::What::delay: std::this_thread::sleep_for(std::chrono::milliseconds(fault.amount)); break;
    case Fault::What::short_transfer:
      changed.memory = request.memory.first(std::min<std::size_t>(fault.amount, request.memory.size()));
      break;
    case Fault::What::torn_write:  // reports that all was written
      changed.memory = request.memory.first(std::min<std::size_t>(fault.amount, request.memory.size()));
      return system_call(changed) < 0 ? -EIO : static_cast<std::int64_t>(request.memory.size());
    case Fault::What::flipped_bit: {
      const std::int64_t answer = system_call(request);  // the call is a read: the bytes in memory are changed
      if (answer > 0) request.memory[fault.amount / 8] ^= std::byte{1} << (fault.amount % 8);
      return answer;
    }
  }
  return system_call(changed);
}

void FaultyRing::refuse(int error, std::size_t times, Which which) {
  const std::lock_guard lock(mutex_);
  error_ = error;
  times_ = times;
  which_ = which;
}

void FaultyRing::lose_next_submission() {
  const std::lock_guard lock(mutex_);
  loses_ = true;
}

RingEntry FaultyRing::entry() {
  return {.enter = [this](std::size_t requests, const std::function<int()>& call) { return enter(requests, call); },
          .max_refusals = given_up_after,
          .pause = {}};
}

int FaultyRing::enter(std::size_t requests, const std::function<int()>& call) {
  {
    const std::lock_guard lock(mutex_);
    if (loses_ && requests > 0) {
      loses_ = false;
      return static_cast<int>(requests);
    }
    const bool meant = which_ == Which::all || (which_ == Which::submissions) == (requests > 0);
    if (!loses_ && meant && times_ > 0) {
      if (times_ != always) --times_;
      return -error_;
    }
  }
  return call();
}

std::int64_t ForgetfulDrive::operator()(const IoRequest& request) {
  const std::lock_guard lock(mutex_);
  if (calls_left_ == 0) return -EIO;
  --calls_left_;
  if (request.kind == IoKind::flush) {
    std::erase_if(unflushed_, [&](const Overwritten& old) { return old.file == request.file; });
  } else if (request.kind == IoKind::write) {
    const HostPages before = map_host_pages(request.memory.size(), "a test");
    const std::span<std::byte> bytes{before.get(), request.memory.size()};
    const std::int64_t read = system_call({IoKind::read, request.file, request.offset, bytes});
    if (read > 0) unflushed_.push_back({request.file, request.offset, {bytes.begin(), bytes.begin() + read}});
  }
  return system_call(request);
}

void ForgetfulDrive::die_after(std::size_t calls) {
  const std::lock_guard lock(mutex_);
  calls_left_ = calls;
}

void ForgetfulDrive::lose_power(Forgets forgets, unsigned seed) {
  const std::lock_guard lock(mutex_);
  std::mt19937 random(seed);
  const HostPages block = map_host_pages(block_bytes, "a test");
  for (auto old = unflushed_.rbegin(); old != unflushed_.rend(); ++old) {
    for (std::size_t first = 0; first < old->bytes.size(); first += block_bytes) {
      if (forgets == Forgets::at_random && random() % 2 == 0) continue;
      std::copy_n(old->bytes.begin() + static_cast<std::ptrdiff_t>(first), block_bytes, block.get());
      system_call({IoKind::write, old->file, old->offset + first, {block.get(), block_bytes}});
    }
  }
  unflushed_.clear();
}

}  // namespace ballast::offload

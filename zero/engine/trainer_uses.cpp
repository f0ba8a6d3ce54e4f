#include "zero/engine/trainer_uses.h"

namespace ballast {

void TrainerUses::begin(const Op& op, OpStatus& status) {
  const Stream* const stream = trainer_.stream();
  std::shared_ptr<GpuSpan> on_gpu = stream != nullptr ? std::make_shared<GpuSpan>(stream->gpu()) : nullptr;
  if (on_gpu) on_gpu->begin.record(*stream);
  const Use& use = open_.emplace_back(Use{&op, std::chrono::steady_clock::now(), on_gpu});
  status = {.begun = use.promise.completion(), .on_gpu = std::move(on_gpu)};
}

void TrainerUses::end(std::size_t number) {
  Use& ended = open_[number - first_];
  ended.ended = true;
  if (!ended.on_gpu) counters_.count(*ended.op, ended.begin, std::chrono::steady_clock::now());
  while (!open_.empty() && open_.front().ended) {
    if (open_.front().on_gpu) open_.front().on_gpu->end.record(*trainer_.stream());
    open_.front().promise.finish();
    open_.pop_front();
    ++first_;
  }
}

}  // namespace ballast

// Tiles that the lowering does not know.
// RUN: gossamer-opt %s -p expose-storage,lower-gpu-blocks --split-input-file --verify-diagnostics

#BSR = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d0 floordiv 32 : dense, d1 floordiv 32 : compressed, d0 mod 32 : dense, d1 mod 32 : dense), posWidth = 32, crdWidth = 32
}>
// expected-error @unknown {{tile [128, 24, 32] is not [128, rows, columns] with rows and columns one of}}
func.func @rows(%x: tensor<?x256xbf16>, %w: tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-blocks", tile = [128, 24, 32]} : (tensor<?x256xbf16>, tensor<64x256xbf16, #BSR>) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

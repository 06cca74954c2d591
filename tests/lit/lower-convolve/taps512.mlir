// On vectors of 512 bits what is stored is compressed in a register first.
// RUN: gossamer-opt %s -p 'expose-storage,lower-convolve,canonicalize,cse' | filecheck %s

// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x6x?xf32>,
// CHECK:         vector.expandload %[[X]]
// CHECK-NOT:     vector.compressstore
// CHECK:         llvm.call_intrinsic "llvm.experimental.vector.compress.v16i32"
// CHECK:         vector.maskedstore
#KB = #sparse_tensor.encoding<{
  map = (d0, d1) -> (d1 floordiv 36 : dense, d0 : dense, d1 mod 36 : compressed), posWidth = 32, crdWidth = 16
}>
func.func @region(%x: tensor<?x6x?xf32>, %w: tensor<8x54xf32, #KB>, %d: index, %h: index, %v: index) -> tensor<?x8x?xf32> {
  %y = "kernel.convolve"(%x, %w, %d, %h, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, window = [1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 5, 5, 1, 4, 2, 0]}
    : (tensor<?x6x?xf32>, tensor<8x54xf32, #KB>, index, index, index) -> tensor<?x8x?xf32>
  return %y : tensor<?x8x?xf32>
}

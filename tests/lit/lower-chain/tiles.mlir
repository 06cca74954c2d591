// Where the target multiplies tiles of bf16, so does attention in heads of 32 features, or 64 ...
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain{bf16=true tiles=true}' | filecheck %s

// Keys are transposed out of their lines and multiplied with those of the queries, values with those of the weights; of the last
// values there may be fewer than a tile has.
// CHECK-LABEL: func.func private @attention_attend_tile16(
// CHECK:         %[[KEYS:.*]] = memref.view %{{.*}} : memref<1024xi8> to memref<16x32xbf16>
// CHECK:         %[[K:.*]] = x86.amx.tile_load %[[KEYS]]
// CHECK:         %[[Q:.*]] = x86.amx.tile_load
// CHECK:         %[[S:.*]] = x86.amx.tile_mulf %[[K]], %[[Q]]
// CHECK:         x86.amx.tile_store %{{.*}}, %[[S]]
// CHECK:         scf.for
// CHECK:           x86.amx.tile_mulf
// CHECK:           vector.maskedload
// CHECK:           x86.amx.tile_mulf
// CHECK-NOT:     x86.avx512.dot
func.func @attention(%x: tensor<?x64xbf16>, %w: tensor<64x64xbf16, "rowpairs(reduction=1, width=16)">, %length: index) -> tensor<?x64xbf16> {
  %q = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [16, 64]} : (tensor<?x64xbf16>, tensor<64x64xbf16, "rowpairs(reduction=1, width=16)">) -> tensor<?x64xbf16>
  %y = "kernel.attend"(%q, %x, %x, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 32 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x64xbf16>, tensor<?x64xbf16>, tensor<?x64xbf16>, index) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

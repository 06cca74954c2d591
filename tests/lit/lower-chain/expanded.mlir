// Weights that are expanded to AMX's tiles: once for all tiles of tokens of a task.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain{bf16=true tiles=true},canonicalize,cse' | filecheck %s

// Two strips of 16 rows share each tile of x. Their sums before go through the epilogue between the products; after the loops
// come those of the last block. What expanded weights need is in the memory of the thread.
// CHECK-LABEL: func.func private @ffn_product_tile64(
// CHECK:         %[[MEMORY:.*]] = memref.view %arg0{{.*}} : memref<?xi8> to memref<12288xi8>
// CHECK:         %[[SUMS:.*]] = memref.alloca() {alignment = 64 : i64} : memref<2x32x32xf32>
// CHECK:         %[[LINES:.*]] = memref.view %[[MEMORY]]{{.*}} to memref<192x32xbf16>
// CHECK:         scf.for
// CHECK-COUNT-32:  "llvm.x86.avx512.mask.expand.v32i16"
// CHECK:           scf.for
// CHECK:             x86.amx.tile_zero
// CHECK:             %{{.*}}:4 = scf.for
// CHECK-COUNT-2:       x86.amx.tile_load %{{.*}} : memref<96x128xbf16>
// CHECK:               x86.amx.tile_load %[[LINES]]
// CHECK-COUNT-2:       x86.amx.tile_mulf
// CHECK:               arith.negf
// CHECK:               vector.store %{{.*}} vector<32xbf16>
// CHECK:               x86.amx.tile_load %[[LINES]]
// CHECK-COUNT-2:       x86.amx.tile_mulf
// CHECK:               arith.negf
// CHECK:             x86.amx.tile_store %[[SUMS]]
// CHECK:         scf.for
// CHECK-NOT:       x86.amx
// CHECK:           arith.negf
// CHECK-LABEL: func.func @ffn(
// CHECK:           call @ffn_product_tile64
func.func @ffn(%x: tensor<?x192xbf16>, %v: tensor<96x192xbf16, "tilemap(reduction=1, columns=32)">, %w: tensor<64x96xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x64xbf16> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    %0 = arith.negf %sum : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [64]} : (tensor<?x192xbf16>, tensor<96x192xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x96xbf16>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [64]} : (tensor<?x96xbf16>, tensor<64x96xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}

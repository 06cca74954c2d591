// Weights that are expanded to AMX's tiles: once for all tiles of tokens of a task.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain{bf16=true tiles=true},canonicalize,cse' | filecheck %s

// Two strips of 16 rows share each tile of x. Between the products, what was computed before goes through the epilogue; in the end
// comes that of the last ones.
// CHECK-LABEL: func.func private @ffn_product_tile64(
// CHECK:         memref.alloca() {alignment = 64 : i64} : memref<2x32x32xf32>
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<
// CHECK:         scf.for
// CHECK-COUNT-2:   llvm.intr.masked.expandload{{.*}}
// CHECK-LABEL: func.func @ffn(
func.func @ffn(%x: tensor<?x64xbf16>, %v: tensor<96x64xbf16, "tilemap(reduction=1, columns=32)">, %w: tensor<64x96xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x64xbf16> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    %0 = arith.negf %sum : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [64]} : (tensor<?x64xbf16>, tensor<96x64xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x96xbf16>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxexpand", tile = [64]} : (tensor<?x96xbf16>, tensor<64x96xbf16, "tilemap(reduction=1, columns=32)">) -> tensor<?x64xbf16>
  return %y : tensor<?x64xbf16>
}
